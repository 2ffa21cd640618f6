"""A small ResNet, for images from 8 by 8 to 224 by 224 pixels."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

MAX_STAGE_SIDE = 64  # largest side, in pixels, in the first stage
MIN_SIDE = 4  # smallest side, in pixels, after halving: BatchNorm needs positions to average over


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut (He et al. 2015, the basic block)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            convolution = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels_in, h, w] -> [batch, channels, h / stride, w / stride]."""
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x), inplace=True)


class CNN(nn.Module):
    """A stem, `stages` of residual `blocks`, global average pooling and a linear layer.

    [batch, in_channels, image_size, image_size] -> [batch, classes]. The stem reduces images to a
    side of 64 pixels or less; each later stage doubles the channels, and halves the sides while
    these stay at 4 pixels or more.
    """

    def __init__(
        self,
        *,
        in_channels: int,
        image_size: int,
        classes: int,
        width: int,
        stages: int,
        blocks: int,
    ) -> None:
        super().__init__()
        stem: list[nn.Module] = []
        side, channels_in = image_size, in_channels
        while True:
            stride = 2 if side > MAX_STAGE_SIDE else 1
            convolution = nn.Conv2d(channels_in, width, 3, stride, 1, bias=False)
            stem += [convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            side, channels_in = -(-side // stride), width
            if side <= MAX_STAGE_SIDE:
                break
        self.stem = nn.Sequential(*stem)
        self.blocks = nn.ModuleList()
        for stage in range(stages):
            channels = width * 2**stage
            for block in range(blocks):
                halve = stage > 0 and block == 0 and side >= 2 * MIN_SIDE
                self.blocks.append(ResidualBlock(channels_in, channels, 2 if halve else 1))
                side, channels_in = -(-side // 2) if halve else side, channels
        self.head = nn.Linear(channels_in, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return logits or regression values, [batch, classes]."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]
