"""An image classifier: patches as tokens, learned positions, and the dense family's blocks without
the causal mask. Every patch votes for the class of its image. The sizes of images are in
model.options (`phalanx.core.image`), the number of classes is model.vocab_size."""

from __future__ import annotations

from torch import Tensor, nn

from phalanx.core.errors import UserError
from phalanx.core.image import ImageShape
from phalanx.core.shape import ModelConfig
from phalanx.model.dense import DENSE, Block
from phalanx.model.family import Batch, Family, Init
from phalanx.model.head import Head
from phalanx.model.rms import make_norm


class Classifier(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        shape = _shape(c)
        self.embed = nn.Linear(shape.features, c.dim)
        self.position = nn.Embedding(shape.num_patches, c.dim)
        self.layers = nn.ModuleDict({str(i): Block(c, causal=False) for i in range(c.num_layers)})
        self.norm = make_norm(c.dim, c)
        self.head = Head(c.dim, c.vocab_size, softcap=c.logit_softcap)

    def forward(self, batch: Batch, x_BLD: Tensor | None = None) -> Tensor:
        if x_BLD is None:
            patches_BLP = batch.tokens_BL.to(self.embed.weight.dtype)
            x_BLD = self.embed(patches_BLP) + self.position(batch.positions()[None])
        for layer in self.layers.values():
            x_BLD = layer(x_BLD, None, batch)
        return self.head(self.norm(x_BLD), batch)  # (B, L, classes)


def _shape(c: ModelConfig) -> ImageShape:
    shape = ImageShape.of(c.options)
    if shape is None:
        raise UserError(
            "they do not give the size of an image and of a patch that divides it",
            field="model.options",
            value=c.options,
            remedy="give image, patch and channels as whole numbers, such as image = 32, patch = 8, channels = 1",
        )
    return shape


def _init(name: str, c: ModelConfig) -> Init:
    if name.endswith("bias"):
        return Init(std=0.0)
    if name == "embed.weight":
        return Init(std=_shape(c).features ** -0.5)
    return DENSE.init(name, c)


IMAGE = Family(
    build=Classifier,
    init=_init,
    split={**DENSE.split, "embed": "input", "position": "vocab"},
    first=("embed", "position"),
    last=("norm", "head"),
    ends_in_head=True,
)
