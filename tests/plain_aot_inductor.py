"""A model of torch's own operations on a GPU through AOTInductor, to a package at argv[1]: exits
with 0 where it loads. A torch whose standard library is not the compiler's crashes in there."""

import json
import sys

import torch


class Plain(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


program = torch.export.export(Plain(), (torch.zeros(4, device="cuda"),))
path = torch._inductor.aoti_compile_and_package(
    program, package_path=sys.argv[1], inductor_configs=json.loads(sys.argv[2])
)
torch._inductor.aoti_load_package(path)
