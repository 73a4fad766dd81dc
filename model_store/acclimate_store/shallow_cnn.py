"""The small network of the Fashion-MNIST experiments of ATP and FedTHE."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class ShallowCNN(nn.Module):
    """Three convolutions and two linear layers, each but the last with BatchNorm and ReLU.

    Args:
        num_classes: K, the width of the last layer `linear5`.
        width: channels of the first convolution; the other layers have twice as many. The papers have 32.
    """

    def __init__(self, num_classes: int = 10, width: int = 32) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, kernel_size=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, kernel_size=3, bias=False)
        self.bn2 = nn.BatchNorm2d(2 * width)
        self.conv3 = nn.Conv2d(2 * width, 2 * width, kernel_size=3, bias=False)
        self.bn3 = nn.BatchNorm2d(2 * width)
        self.linear4 = nn.Linear(18 * width, 2 * width)
        self.bn4 = nn.BatchNorm1d(2 * width)
        self.linear5 = nn.Linear(2 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, K] of images [B, 1, 28, 28]."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        x = F.relu(self.bn3(self.conv3(x))).flatten(1)
        features = F.relu(self.bn4(self.linear4(x)))
        logits: Tensor = self.linear5(features)
        return logits
