"""From bytes to what the network sees, on the device: scale, crop, flip. Nothing here waits for it."""

import torch
from torch import Tensor
from torch.nn import functional as F


def normalized(pixels: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """(bytes - mean) / deviation by channel, (B, C, H, W) float32."""
    return (pixels.float() - mean.view(-1, 1, 1)) / deviation.view(-1, 1, 1)


def pad_crop_flip(images: Tensor, *, pad: int = 4, generator: torch.Generator) -> Tensor:
    """Each image padded by zeros, cropped back to its size at a place of its own, and flipped half of the time."""
    count, _, height, width = images.shape
    device = images.device
    down = torch.randint(2 * pad + 1, (count, 1), generator=generator, device=device)
    right = torch.randint(2 * pad + 1, (count, 1), generator=generator, device=device)
    flip = torch.rand((count, 1), generator=generator, device=device) < 0.5
    columns = torch.arange(width, device=device).expand(count, -1)
    rows = down + torch.arange(height, device=device)  # (B, H)
    columns = right + torch.where(flip, width - 1 - columns, columns)  # (B, W)
    padded = F.pad(images, (pad, pad, pad, pad)).permute(0, 2, 3, 1)  # (B, H + 2 pad, W + 2 pad, C)
    picked = padded[torch.arange(count, device=device).view(-1, 1, 1), rows.unsqueeze(2), columns.unsqueeze(1)]
    return picked.permute(0, 3, 1, 2)  # (B, C, H, W), channels last in memory
