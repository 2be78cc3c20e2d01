// Text of parts, whatever a stream can print.
#pragma once

#include <sstream>
#include <string>

namespace flash {

template <class... Parts>
std::string concat(Parts const&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

}  // namespace flash
