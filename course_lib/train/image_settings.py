"""What a run on images is asked to do: keys of its YAML file, and options of its command."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from course_lib.data.streamed import limit_of

from .config import option


@dataclass(frozen=True)
class ImageSettings:
    """A run of `train images`; each field says what it is for."""

    model: str = option("tiny_cnn", "tiny_cnn, resnet18_small, continuous_integration, or any "
                        "network of torchvision's or timm's")
    depth: Literal["shallow", "medium", "deep"] = option(
        "shallow", "of continuous_integration: shallow, medium or deep")
    base_channels: int = option(32, "of continuous_integration's first blocks", 1)
    integration_points: Literal["early", "middle", "late", "all"] = option(
        "all", "where continuous_integration integrates: early, middle, late or all")

    data: str | None = option(None, "folder or zip: class folders, train and val of them, or "
                              "Tiny-ImageNet; or cifar100 (default: 500 leaves, drawn)")
    download: bool = option(False, "let torchvision download cifar100")
    cache: Path | None = option(None, "folder that keeps the decoded images for the next run")
    image_size: int | None = option(None, "height and width of the images (default: 64; "
                                    "cifar100's own 32)", 1)
    validation_fraction: float = option(0.2, "of each class, where the set has no split", 0)
    load_subset: float | None = option(None, "2 or more: so many classes, the first by name; below "
                                       "1: that share of each class's training images", 0)
    num_workers: int | None = option(None, "processes that decode (default: one for each core)", 0)
    prefetch_factor: int = option(2, "chunks of 256 images, or batches of a streamed set, that "
                                  "each of them makes ahead", 1)
    memory_limit: str | None = option(None, "memory for decoded images, such as 8GB; a larger set "
                                      "is streamed (default: three quarters of what is free)")

    device: str | None = option(None, "auto, mps, cuda, cuda:1 or cpu (default: the first of MPS, "
                                "CUDA and CPU that is here); of continuous_integration also two, "
                                "such as cuda:0,cuda:1, one for each pathway")
    precision: Literal["float32", "tf32", "bfloat16", "float16"] | None = option(
        None, "float32 (default), tf32, bfloat16 or float16")
    enable_mixed_precision: bool = option(False, "bfloat16, or float16 where the device lacks it")
    channels_last: bool = option(False, "images and weights lie channels-last in memory")
    compile: bool = option(False, "torch.compile; where it fails, the run goes on without")
    enable_gradient_checkpointing: bool = option(
        False, "compute activations again in the backward pass, for less memory")
    grad_accum_steps: int = option(1, "parts that a batch is computed in, for less memory", 1)
    memory_fraction: float | None = option(None, "share of the GPU's memory to take at most", 0)
    cudnn_benchmark: bool = option(True, "let cuDNN try its algorithms first")
    deterministic: bool = option(False, "the same bits in every run, on a GPU too")
    kernels: Literal["ours", "torch", "faster"] | None = option(
        None, "whose layers, loss and optimiser: ours (default on an NVIDIA GPU) or torch; faster: "
        "torch, but for layers that are faster by ours on this GPU")
    capture: bool | None = option(None, "a step in one CUDA graph (default on an NVIDIA GPU)")
    profile: bool = option(False, "keep a trace of some steps, and a table of where time goes")

    epochs: int = option(20, "how often each image is seen", 1)
    batch_size: int = option(128, "images in a step", 1)
    optimizer: Literal["sgd", "adam", "adamw"] = option("adam", "sgd (Nesterov), adam or adamw")
    learning_rate: float = option(1e-3, "the highest", 0)
    momentum: float = option(0.9, "of sgd", 0)
    weight_decay: float = option(0.0, "of weights; biases and scales are left alone", 0)
    schedule: Literal["cosine", "one_cycle", "constant"] = option(
        "cosine", "of the learning rate: cosine, one_cycle or constant")
    warm_up_epochs: float = option(0.0, "in which the learning rate rises", 0)
    clip_grad: float | None = option(None, "largest norm of all gradients together", 0)
    label_smoothing: float = option(0.0, "share of each label that is spread over all classes", 0)
    mixup: float = option(0.0, "alpha of MixUp; 0: none", 0)
    cutmix: float = option(0.0, "alpha of CutMix; 0: none", 0)
    sync_batch_norm: bool = option(False, "of several ranks, batch norms take the joint batch's "
                                   "statistics")
    augment: bool = option(True, "flip at random, and crop from 8 black pixels around")
    padding: int = option(8, "the black pixels around", 0)
    model_ema: bool = option(False, "evaluate an average of the weights over the steps")
    model_ema_decay: float = option(0.999, "what each step leaves of that average", 0)
    seed: int = option(0, "of all random numbers", 0)

    max_minutes: float | None = option(None, "stop after the epoch after which the next would take "
                                       "longer; the same command goes on", 0)
    checkpoint_steps: int | None = option(None, "steps from one checkpoint to the next (default: "
                                          "an epoch)", 1)
    checkpoint_dir: Path | None = option(None, "where the run is kept, as --output")


#: What may change when a run goes on: where things lie, how fast they come, what is looked at.
FREE = {
    "data", "download", "cache", "num_workers", "prefetch_factor", "memory_limit", "device",
    "memory_fraction", "cudnn_benchmark", "profile", "max_minutes", "checkpoint_steps",
    "checkpoint_dir", "enable_mixed_precision",
}  # fmt: skip


def require_sensible(settings):
    """Raise ValueError for numbers that the dataclass lets pass and no run can have."""
    for key, below in (
        ("label_smoothing", 1), ("model_ema_decay", 1), ("momentum", 1), ("validation_fraction", 1),
    ):  # fmt: skip
        if not 0 <= getattr(settings, key) < below:
            raise ValueError(f"{key} must be from 0 to below {below}, not {getattr(settings, key)}")
    for key in ("learning_rate", "clip_grad", "max_minutes", "memory_fraction"):
        value = getattr(settings, key)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{key} must be above 0, not {value}")
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, float) and value != value:
            raise ValueError(f"{field.name} must be a number, not {value}")
    limit_of(settings.memory_limit)
    if settings.grad_accum_steps > settings.batch_size:
        raise ValueError(
            f"grad_accum_steps ({settings.grad_accum_steps}) must not be above batch_size "
            f"({settings.batch_size}), which it divides"
        )
    if settings.warm_up_epochs > settings.epochs:
        raise ValueError(
            f"warm_up_epochs ({settings.warm_up_epochs}) must not be above epochs "
            f"({settings.epochs})"
        )
    if settings.enable_mixed_precision and settings.precision in ("float32", "tf32"):
        raise ValueError(
            f"precision {settings.precision} and enable_mixed_precision contradict each other: "
            "leave one out"
        )
