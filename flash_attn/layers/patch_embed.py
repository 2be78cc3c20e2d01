"""An image as a sequence of patches (Dosovitskiy et al. 2020, arXiv:2010.11929)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

__all__ = ["PatchEmbed"]


def _pair(x: int | tuple[int, int]) -> tuple[int, int]:
    return (x, x) if isinstance(x, int) else tuple(x)


class PatchEmbed(nn.Module):
    """(batch, in_chans, height, width) → (batch, patches, embed_dim).

    A linear layer of the patches' pixels, which is the convolution whose stride is its width:
    ``proj.weight`` is that of the convolution, flattened, (embed_dim, in_chans · height · width).

    Args:
        img_size, patch_size: in pixels, an int or (height, width).
        norm_layer: makes the norm from embed_dim; None for none.
        flatten: else the patches stay a grid, (batch, rows, columns, embed_dim).
        bias: of the layer. fused_bias_fc: accepted for the drop-in.

    Raises:
        ValueError: an image of another size, or one that is no multiple of the patches.
    """

    img_size: tuple[int, int]
    patch_size: tuple[int, int]
    proj: nn.Linear

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        norm_layer: Callable[[int], nn.Module] | None = None,
        flatten: bool = True,
        bias: bool = True,
        fused_bias_fc: bool = False,
    ):
        """Arguments, defaults and errors: see the class."""
        super().__init__()
        self.img_size, self.patch_size = _pair(img_size), _pair(patch_size)
        if any(size % patch for size, patch in zip(self.img_size, self.patch_size)):
            raise ValueError(
                f"img_size: got {self.img_size}; a multiple of {self.patch_size} is needed"
            )
        rows, columns = (size // patch for size, patch in zip(self.img_size, self.patch_size))
        self.grid_size: tuple[int, int] = (rows, columns)
        self.num_patches: int = rows * columns
        self.flatten = flatten
        pixels = in_chans * self.patch_size[0] * self.patch_size[1]
        self.proj = nn.Linear(pixels, embed_dim, bias=bias)
        self.norm: nn.Module = norm_layer(embed_dim) if norm_layer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2:] != self.img_size:
            raise ValueError(f"x: got {tuple(x.shape[-2:])} pixels; {self.img_size} are needed")
        (rows, columns), (height, width) = self.grid_size, self.patch_size
        patches = x.unflatten(3, (columns, width)).unflatten(2, (rows, height))
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3)  # (b, rows, columns, c · h · w)
        x = self.proj(patches)
        return self.norm(x.flatten(1, 2) if self.flatten else x)
