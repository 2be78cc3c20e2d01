// Empty, in the place of CuTe's header of this path: see third_party/README.md.
#pragma once
