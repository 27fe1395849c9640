"""Training on images of any kind, on any device: one program, from settings.

model, history = train_images(ImageSettings(data="tiny-imagenet-200", epochs=50))
"""

import contextlib
import dataclasses
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from course_lib import SIMULATED, data, models, nn, ops, optim, plot
from course_lib.data import decoded, streamed

from . import checkpoint, device, faster, feeding, loop, memory, ranks
from .image_classifier import ImageClassifier
from .image_settings import FREE, ImageSettings, require_sensible
from .profiling import Profiled
from .randomness import seed_of
from .sync_batch_norm import synchronised

INTEGRATION = "integration.png"
#: The share of a GPU's free memory that the training images may take; else they stay on the host.
ROOM = 0.5
EARLIER = {"sync_batch_norm": False}  # what checkpoints were made by that do not say it
WORST = 10  # classes in the table of those that the network knows least


def train_images(
    settings=None, *, output=None, resume=False, downloads=None, progress=None, report=None,
    say=None, tell=print,
):  # fmt: skip
    """Train as `settings`, `ImageSettings`, say; (model, history).

    output     a folder; settings.checkpoint_dir by default
    resume     go on from the folder's checkpoint; with settings.max_minutes, if there is one
    downloads  the folder of downloaded sets
    progress, say
               as in `loop.fit`
    report     called with each epoch's dict, which then has images_per_second too
    tell       called with each line about the set and the network, and at the end with a table of
               the classes that it knows least

    The model comes back on its device, in evaluation mode: with settings.model_ema, the average.
    Raises ValueError for settings that cannot be used, `data.DataError` for such a set, and what
    `loop.fit` raises.
    """
    begin = time.monotonic()
    settings = settings or ImageSettings()
    require_sensible(settings)
    settings, places = decided(settings)
    place = places[0]
    limit, source = ranks.first(lambda: streamed.limit_of(settings.memory_limit))
    allowed = limit // ranks.on_host(), source
    output = settings.checkpoint_dir if output is None else Path(output)
    if output is None and (settings.profile or settings.max_minutes):
        raise ValueError("profile and max_minutes need a folder: name the output")
    if output is not None:
        if settings.max_minutes is not None:
            resume = ranks.first(lambda: resume or (Path(output) / loop.CHECKPOINT).exists())
        loop.require_room(output, resume)  # before the images are read
    say, tell = ranks.aloud(say), ranks.aloud(tell)
    with ranks.in_turn():
        training, validation = read(settings, downloads, progress, allowed[0])
    for line in facts(settings, places, training, validation, allowed):
        tell(line)
    before = faster.earlier(output, resume, (faster.LAYERS, "images"))
    kept = before | kept_settings(settings, training, validation, before.get("images"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(settled(settings, place))
        stack.enter_context(memory.explained(kept))
        task = make_task(settings, places, training, validation, say, kept)
        stack.callback(task.close)
        history = loop.fit(
            Profiled(task, output, say) if settings.profile and ranks.is_first() else task, kept,
            output=output,
            resume=resume, checkpoint_steps=settings.checkpoint_steps, progress=progress,
            report=report and (lambda entry: report(entry | {"images_per_second": task.speed})),
            say=say, until=settings.max_minutes and begin + 60 * settings.max_minutes,
            earlier=EARLIER,
        )  # fmt: skip
        for line in worst_classes(task, validation):
            tell(line)
        if place.type == "cuda":
            peaks = [f"{torch.cuda.max_memory_allocated(each) / 1e9:.2f} GB" for each in places]
            tell(f"Peak memory: {', '.join(peaks)}.")
    if output is not None and ranks.is_first() and "integration_weights" in history[0]:
        picture = plot.integration_weights(history).png()
        checkpoint.write_whole(output / INTEGRATION, lambda file: file.write(picture))
    model = task.model if task.average is None else task.average.module
    return model.eval(), history


def decided(settings):
    """(`settings` without a choice left open, the devices); ValueError for what is not here."""
    precision = settings.precision or "float32"
    places = device.choose_all(settings.device)
    place = places[0]
    if settings.enable_mixed_precision and settings.precision is None:
        precision = device.half_of(place)
    device.choose_all(settings.device, precision)
    if precision == "tf32" and place.type != "cuda":
        raise ValueError(f"tf32 needs an NVIDIA GPU, and this run is on {place}: choose float32")
    on_gpu = place.type == "cuda" and not SIMULATED
    if settings.capture and not on_gpu:
        raise ValueError(f"capture needs an NVIDIA GPU, and this run is on {place}: leave it out")
    if settings.channels_last:
        device.require_channels_last(place)
    kernels = settings.kernels or ("ours" if on_gpu else "torch")
    alone = len(places) == 1
    capture = on_gpu and alone if settings.capture is None else settings.capture
    settled = {"precision": precision, "kernels": kernels, "capture": capture}
    settings = dataclasses.replace(settings, **settled)
    if not alone:
        _require_one_device(settings)
    return settings, places


def _require_one_device(settings):
    """Raise ValueError for what is of one device only."""
    asked = {
        "--capture": settings.capture,
        "--compile": settings.compile,
        "--kernels faster": settings.kernels == faster.FASTER,
        "--memory-fraction": settings.memory_fraction is not None,
    }
    if told := [option for option, is_asked in asked.items() if is_asked]:
        raise ValueError(
            f"{told[0]} needs one device, and {settings.device!r} names two: leave one of them out"
        )


def settled(settings, place):
    """The context of a run: on a CPU, results are the same in every run anyway."""
    return device.settled(
        place, precision=settings.precision, benchmark=settings.cudnn_benchmark,
        deterministic=settings.deterministic or place.type == "cpu",
        memory_fraction=settings.memory_fraction,
    )  # fmt: skip


def read(settings, downloads=None, progress=None, allowed=None):
    """(training part, validation part) of the set that `settings` name.

    allowed  bytes that decoded images may take; None: as `settings` say
    """
    if allowed is None:
        allowed, _ = streamed.limit_of(settings.memory_limit)
    return data.images(
        settings.data, image_size=settings.image_size, subset=settings.load_subset,
        validation_fraction=settings.validation_fraction, seed=settings.seed, cache=settings.cache,
        downloads=downloads, download=settings.download, workers=settings.num_workers,
        prefetch=settings.prefetch_factor, progress=progress, memory=allowed,
    )  # fmt: skip


def facts(settings, places, training, validation, allowed):
    """What is trained on what, in lines.

    allowed  bytes that decoded images may take, and where that number comes from
    """
    shape, gigabytes = tuple(training.images.shape[1:]), training.images.nbytes / 1e9
    layers = {"ours": "our", "torch": "PyTorch's", "faster": "our or PyTorch's"}[settings.kernels]
    names = ", ".join(training.classes[:5]) + (", …" if len(training.classes) > 5 else "")
    yield f"Device: {', '.join(map(str, places))}"
    yield f"Model: {settings.model}, {layers} layers, {settings.precision}"
    yield f"Classes: {len(training.classes)} ({names})"
    counts = f"Data: {len(training):,} images to train on, {len(validation):,} to validate"
    if not isinstance(training.images, data.Streamed):
        yield f"{counts}; as bytes of shape {shape} they take {gigabytes:.2f} GB of memory"
        return
    yield counts
    yield feeding.streaming(training, validation, settings.batch_size, allowed) + (
        " It uses no cache." if settings.cache else ""
    )


def kept_settings(settings, training, validation, earlier=None):
    """What decides the result, in plain values: what a checkpoint is compared by.

    earlier  what it kept of the images: a hash, which of a set that was streamed is of names alone
    """
    found = {k: v for k, v in dataclasses.asdict(settings).items() if k not in FREE}
    return {"task": "images"} | found | {
        "classes": list(training.classes), "image_size": training.images.shape[-1],
        "images": decoded.digests(training, validation, earlier),
    }  # fmt: skip


def create(settings, n_classes, image_size):
    """The network of `settings` with its first weights, the same on every device."""
    torch.manual_seed(seed_of(settings.seed, "weights"))
    ours, options = settings.kernels == "ours", {}
    if settings.model == "tiny_cnn":
        options = {"image_size": image_size}
    if settings.model == "continuous_integration":
        options = {
            "depth": settings.depth, "base_channels": settings.base_channels,
            "integration_points": settings.integration_points,
            "enable_mixed_precision": False,  # the run's own precision says it
            "memory_efficient": False,  # `device.checkpointed` turns it on
        }  # fmt: skip
    model = models.create_model(settings.model, n_classes, ours, **options)
    if ours:
        nn.replace_layers(model)
    return model


def make_task(settings, places, training, validation, say, kept=None):
    """The task for `loop.fit`, whose steps are `GraphTrainer`'s, captured or not.

    kept  what `kept_settings` found; with kernels "faster", the layers' names are added to it
    """
    image_size = training.images.shape[-1]
    place = places[0]
    model = device.spread(create(settings, len(training.classes), image_size), places)
    if settings.enable_gradient_checkpointing:
        device.checkpointed(model)
    network = model
    if settings.compile or settings.kernels == faster.FASTER:
        layout = torch.channels_last if settings.channels_last else torch.contiguous_format
        model.to(memory_format=layout)
        rows = min(len(training), -(-settings.batch_size // settings.grad_accum_steps))
        example = torch.zeros(rows, 3, image_size, image_size, device=place)
        example = example.to(memory_format=layout)
    if settings.kernels == faster.FASTER:
        kept = {} if kept is None else kept
        captured = bool(settings.capture)
        faster.settle(model, kept, example, settings.precision, captured=captured, say=say)
    if settings.sync_batch_norm and ranks.count() > 1:
        ranks.require_even(settings.batch_size, settings.grad_accum_steps)
        model = network = synchronised(model)
        if settings.enable_gradient_checkpointing:
            device.checkpointed(model)  # the new layers, too
    if settings.compile:
        network = device.compiled(model, example, precision=settings.precision, say=say)
    steps = len(training) // min(settings.batch_size, len(training))
    return ImageClassifier(
        model, training, validation, network=network, epochs=settings.epochs,
        batch_size=settings.batch_size, learning_rate=settings.learning_rate, seed=settings.seed,
        optimizer=optimizer_of(settings, place), weight_decay=settings.weight_decay,
        loss=ops.cross_entropy if settings.kernels == "ours" else cross_entropy,
        label_smoothing=settings.label_smoothing,
        warm_up=settings.warm_up_epochs * steps / (settings.epochs * steps),
        precision=settings.precision, keep_on_device=fits(training.images, place, say),
        padding=settings.padding if settings.augment else None, mixup=settings.mixup,
        cutmix=settings.cutmix, schedule=settings.schedule, accumulate=settings.grad_accum_steps,
        clip=settings.clip_grad, ema=settings.model_ema_decay if settings.model_ema else None,
        channels_last=settings.channels_last, capture=settings.capture,
    )  # fmt: skip


def optimizer_of(settings, place):
    """What `Classifier` makes its optimiser with: ours, or PyTorch's at its fastest."""
    ours = settings.kernels == "ours"
    library, options = optim if ours else torch.optim, {}
    if not ours and place.type == "cuda":
        options["fused"] = True
        if settings.optimizer != "sgd":
            options["capturable"] = True
    if settings.optimizer == "sgd":
        momentum = settings.momentum
        return lambda groups, lr: library.SGD(
            groups, lr=lr, momentum=momentum, nesterov=momentum > 0, **options
        )
    kind = {"adam": library.Adam, "adamw": library.AdamW}[settings.optimizer]
    return lambda groups, lr: kind(groups, lr=lr, **options)


def fits(images, place, say):
    """Whether images that memory holds go onto the device; `say` is told where they do not."""
    if place.type != "cuda" or isinstance(images, data.Streamed):
        return True
    free = torch.cuda.mem_get_info(place)[0]
    if images.nbytes <= ROOM * free:
        return True
    if say is not None:
        say(
            f"The images take {images.nbytes / 1e9:.2f} GB, more than {ROOM:.0%} of the GPU's free "
            f"{free / 1e9:.2f} GB: they stay on the host, and each batch crosses over."
        )
    return False


def worst_classes(task, part, n=WORST):
    """A table of the classes that the network knows least, in lines; and for what it takes them."""
    labels = part.labels
    found = task.predict(part.images).argmax(1).cpu()
    count = len(part.classes)
    confused = torch.bincount(labels * count + found, minlength=count * count).view(count, count)
    share = confused.diag() / confused.sum(1).clamp(min=1)
    wrong = confused.clone().fill_diagonal_(0)
    width = max(map(len, part.classes))
    yield f"The classes it knows least, of {count}:"
    for row in share.argsort(stable=True)[:n].tolist():
        line = f"{part.classes[row]:{width}}  {share[row]:7.1%}"
        if wrong[row].max() > 0:
            line += f"  {wrong[row].max()} taken for {part.classes[wrong[row].argmax()]}"
        yield line


def load_images(
    path, root=None, *, device_name=None, cache=None, downloads=None, progress=None,
    memory_limit=None,
):  # fmt: skip
    """(task, validation part, settings) of the checkpoint at `path` of a run on images.

    root  where the set lies now; its images must be those that the run was made with

    `task.predict` answers for bytes, uint8 (N, 3, H, W); of a run with model_ema, by the average.
    """
    kept = checkpoint.load_of("images", path, {"classes": list, "images": str, "image_size": int})
    names = {field.name for field in dataclasses.fields(ImageSettings)} - FREE
    try:
        settings = ImageSettings(**{k: v for k, v in kept["settings"].items() if k in names})
        settings = dataclasses.replace(
            settings, data=root, device=device_name, cache=cache, memory_limit=memory_limit
        )
        places = device.choose_all(device_name, settings.precision)
    except TypeError as error:
        raise checkpoint.CheckpointError(f"{path} is of no run on images ({error}).") from None
    training, validation = read(settings, downloads, progress)
    images = kept["settings"]["images"]
    if images != kept_settings(settings, training, validation, images)["images"]:
        raise checkpoint.CheckpointError(
            f"{path} was trained with other images than those of {root or 'the drawn set'}: name "
            "the set that it was made with."
        )
    with settled(settings, places[0]):
        task = make_task(settings, places, training, validation, None, kept["settings"])
        loop.load_state(path, task, kept["state"])
    return task, validation, settings
