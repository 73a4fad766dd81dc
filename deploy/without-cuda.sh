#!/bin/sh
# Cuts a lock in two: torch.txt, the versions of PyTorch, and others.txt, all but PyTorch and what only its CUDA builds need.
set -eu
awk '/^[a-z]/ { torch = /^(torch|torchvision)==/ } torch && /==/ { print $1 }' "$1" > torch.txt
awk '/^[a-z]/ { keep = !/^(torch|torchvision|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)==/ } keep' "$1" > others.txt
