"""`ImageClassifier` and its parts: each switch does what it says, and nothing else."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from course_lib.data import DecodedImages
from course_lib.train import augmenting
from course_lib.train.image_classifier import SCHEDULES, ImageClassifier


def part(n=24, size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=generator)
    return DecodedImages(images, torch.arange(n) % 3, ("a", "b", "c"), tuple(map(str, range(n))))


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3))


def task(model=None, **options):
    given = dict(epochs=2, batch_size=8, learning_rate=1e-2, seed=0)
    given["optimizer"] = lambda groups, lr: torch.optim.SGD(groups, lr=lr)
    return ImageClassifier(model or network(), part(), part(9, seed=1), **given | options)


def weights(of):
    return torch.cat([p.detach().flatten() for p in of.model.parameters()])


def trained(steps=3, **options):
    made = task(**options)
    for step in range(steps):
        made.train_step(step)
    return made


# ------------------------------------------------------------------------ augmentation


def test_normalising_is_what_torchvision_does():
    from torchvision.transforms.v2 import functional

    images = part().images
    wanted = functional.normalize(images.float() / 255, augmenting.MEAN, augmenting.STD)
    found = augmenting.Normalise(torch.device("cpu"))(images)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    last = augmenting.Normalise(torch.device("cpu"), memory_format=torch.channels_last)(images)
    assert last.is_contiguous(memory_format=torch.channels_last) and torch.equal(last, found)


def test_each_image_is_cropped_and_flipped_on_its_own():
    images = part(6, size=5).images
    images_last = images.to(memory_format=torch.channels_last)
    draws = augmenting.drawn(6, 2, 7, "augment", 0)
    draws[0], draws[1] = torch.tensor([2, 2, 0]), torch.tensor([4, 0, 1])
    for given in (images, images_last):
        found = augmenting.cropped_and_flipped(given, draws, 2)
        padded = nn.functional.pad(images, [2] * 4)
        for image, (down, right, flip), whole in zip(found, draws.tolist(), padded, strict=True):
            wanted = whole[:, down : down + 5, right : right + 5]
            assert torch.equal(image, wanted.flip(2) if flip else wanted)
    assert torch.equal(found[0], images[0])  # from the middle, not flipped


def test_draws_reach_every_place_and_follow_from_their_place_alone():
    draws = augmenting.drawn(4000, 8, 0, "augment", 3)
    assert draws.min(0).values.tolist() == [0, 0, 0]
    assert draws.max(0).values.tolist() == [16, 16, 1]
    torch.rand(3)
    assert torch.equal(augmenting.drawn(4000, 8, 0, "augment", 3), draws)
    assert not torch.equal(augmenting.drawn(4000, 8, 0, "augment", 4), draws)


def test_mixup_and_cutmix_mix_images_as_they_say():
    x = torch.arange(1.0, 5.0)[:, None, None, None].expand(4, 3, 8, 6)
    before = x.roll(1, 0)
    found = augmenting.mixed(x, torch.tensor([[0.25, 0.25, 0, 0, 0, 0]]).expand(4, 6))
    torch.testing.assert_close(found, 0.25 * x + 0.75 * before)
    box = [0.75, 1.0, 2, 5, 1, 5]  # 12 of 48 pixels
    found = augmenting.mixed(x, torch.tensor([box]).expand(4, 6))
    wanted = x.clone()
    wanted[:, :, 2:5, 1:5] = before[:, :, 2:5, 1:5]
    assert torch.equal(found, wanted)
    each = torch.tensor([box, [1, 1, 0, 0, 0, 0], box, box])  # each image has its own
    assert torch.equal(augmenting.mixed(x, each)[1], x[1])


def test_what_is_mixed_follows_from_its_place_and_the_label_from_the_area():
    both = [augmenting.mixing(0.2, 1.0, (8, 6), 0, step) for step in range(60)]
    assert both == [augmenting.mixing(0.2, 1.0, (8, 6), 0, step) for step in range(60)]
    mixups, cutmixes = ([m for m in both if (m[1] == 1.0) == cut] for cut in (False, True))
    assert len(mixups) > 10 and len(cutmixes) > 10
    assert all(0 <= m[0] == m[1] < 1 and m[2:] == [0] * 4 for m in mixups)
    for own, _, top, bottom, left, right in cutmixes:
        assert 0 <= top <= bottom <= 8 and 0 <= left <= right <= 6
        assert own == 1 - (bottom - top) * (right - left) / 48
    assert all(m[1] < 1 for m in (augmenting.mixing(1.0, 0, (8, 8), s) for s in range(20)))
    assert all(m[1] == 1 for m in (augmenting.mixing(0, 1.0, (8, 8), s) for s in range(20)))


def test_the_loss_of_a_mixed_batch_has_both_labels():
    made = task(mixup=1.0, label_smoothing=0.1)
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    wanted = nn.functional.one_hot(labels, 3) * 0.3 + nn.functional.one_hot(labels.roll(1), 3) * 0.7
    found = made._loss(logits, labels, torch.tensor([[0.3, 0, 0, 0, 0, 0]]).expand(4, 6))
    torch.testing.assert_close(found, cross_entropy(logits, wanted, label_smoothing=0.1))


@pytest.mark.parametrize("options", [{"mixup": 1.0}, {"cutmix": 1.0}])
def test_a_step_mixes_what_the_network_sees(options):
    made, seen = task(padding=None, **options), []
    made.network.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    (images, _, mix), (labels, same) = made._inputs(0)
    made.train_step(0)
    assert torch.equal(seen[0], augmenting.mixed(made.prepare(images), mix))
    assert not torch.equal(seen[0], made.prepare(images)) and torch.equal(mix, same)
    assert len(labels) == len(mix) == 8


def test_without_augmentation_images_stay_as_they_are():
    seen = []
    made = task(padding=None)
    made.model.register_forward_pre_hook(lambda _, given: seen.append(given[0].clone()))
    made.train_step(0)
    images = made.prepare(part().images)
    assert all(any(torch.equal(x, image) for image in images) for x in seen[0])
    assert not torch.equal(weights(trained(padding=None)), weights(trained(padding=2)))


# --------------------------------------------------------------------------- schedules


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rate_rises_to_its_highest_in_the_steps_that_are_told(name):
    schedule = SCHEDULES[name](40, 10)
    rates = [schedule(step) for step in range(40)]
    assert max(rates) == 1 and min(rates) > 0 and rates[:10] == sorted(rates[:10])
    assert rates[9] == 1 and rates[10:] == sorted(rates[10:], reverse=True)
    assert (rates[-1] < 0.01) == (name != "constant")
    assert SCHEDULES[name](1, 0)(0) > 0  # a run of one step


def test_the_rate_reaches_the_optimiser():
    made = task(schedule="cosine", warm_up=0.5)  # 6 steps, 3 of which warm up
    rates = []
    for step in range(6):
        made.train_step(step)
        rates.append(float(made.optimizer.param_groups[0]["lr"]))
    wanted = [1e-2 * SCHEDULES["cosine"](6, 3)(step) for step in range(6)]
    assert rates == pytest.approx(wanted) and rates[0] == pytest.approx(1e-2 / 3)


# ---------------------------------------------------------------------------- switches


def test_accumulating_is_the_big_batch():
    whole, in_parts = trained(), trained(accumulate=3)
    torch.testing.assert_close(weights(in_parts), weights(whole))
    torch.testing.assert_close(in_parts.totals, whole.totals)
    seen = []
    made = task(accumulate=3)
    made.network.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    made.train_step(0)
    assert seen == [3, 3, 2]


def test_clipping_bounds_the_gradients():
    def norm(made):
        return torch.cat([p.grad.flatten() for p in made.model.parameters()]).norm().item()

    assert norm(trained(1)) > 0.05
    assert norm(trained(1, clip=0.01)) == pytest.approx(0.01, rel=1e-3)


def test_the_average_of_the_weights_differs_and_is_evaluated():
    made, plain = trained(ema=0.2), trained()
    average = torch.cat([p.flatten() for p in made.average.module.parameters()])
    assert torch.equal(weights(made), weights(plain))  # training is left alone
    assert not torch.equal(average, weights(made))
    expected = torch.cat([p.detach().flatten() for p in network().parameters()])
    for step, decay in ((1, 1 / 10), (2, 2 / 11), (3, 0.2)):  # by hand
        expected = decay * expected + (1 - decay) * weights(trained(step))
    torch.testing.assert_close(average, expected)
    images = part(9, seed=1).images
    with torch.no_grad():
        wanted = made.average.module(made.prepare(images))
    torch.testing.assert_close(made.predict(images), wanted)
    assert made.end_epoch()["validation_loss"] != plain.end_epoch()["validation_loss"]


def test_the_average_has_running_statistics_and_counts():
    model = nn.Sequential(nn.BatchNorm2d(3), network())
    made = task(model, ema=0.0)
    for step in range(2):
        made.train_step(step)
    for mine, theirs in zip(made.average.module.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert made.average.module[0].num_batches_tracked == 2
    assert not any(p.requires_grad for p in made.average.module.parameters())


def test_channels_last_reaches_weights_and_images():
    made, seen = task(channels_last=True), []
    made.model.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    made.train_step(0)
    made.predict(part().images)
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x in seen)
    assert made.model[0].weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(weights(made), weights(trained(1)))


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 3))


def test_float16_scales_its_losses_and_lowers_the_scale_after_an_overflow():
    made = task(linear(), precision="float16")
    seen = []
    made.model.register_forward_hook(lambda _, given, found: seen.append(found.dtype))
    made.trainer.train_step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    before = weights(made)
    made.train_step(0)
    assert seen == [torch.float16] and made.trainer.scaler.get_scale() == 2.0**7
    assert not torch.equal(weights(made), before)
    before = weights(made)
    made.trainer.train_step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    made.train_step(1)
    assert torch.equal(weights(made), before) and made.trainer.scaler.get_scale() == 2.0**99
    assert not task(linear(), precision="bfloat16").trainer.scaler.is_enabled()


def test_clipping_takes_the_scale_off_first():
    scaled, plain = (task(linear(), precision=p, clip=1e-3) for p in ("float16", "float32"))
    scaled.trainer.train_step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    before = weights(plain)
    for made in (scaled, plain):
        made.train_step(0)
    moved = weights(plain) - before
    assert moved.norm() > 0
    error = (weights(scaled) - before - moved).abs().max()
    assert error < 0.02 * moved.abs().max()


def test_images_that_stay_on_the_host_train_alike():
    assert torch.equal(weights(trained(keep_on_device=False)), weights(trained()))


def test_speed_counts_images_and_leaves_validation_out(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("course_lib.train.image_classifier.time.perf_counter", lambda: now[0])
    made = task()
    for step in range(3):
        made.train_step(step)
        now[0] += 2.0
    predict = made._predict_validation

    def slow(images):
        now[0] += 1000.0
        return predict(images)

    monkeypatch.setattr(made, "_predict_validation", slow)
    made.end_epoch()
    assert made.speed == 24 / 6  # images, not batches
    now[0] += 500.0
    made.train_step(3)
    now[0] += 1.0
    made.end_epoch()
    assert made.speed == 8


@pytest.mark.parametrize("options", [
    {"ema": 0.9, "mixup": 0.2, "cutmix": 1.0, "clip": 1.0}, {"precision": "float16"},
])
def test_a_state_is_all_that_the_next_steps_need(options):
    model = linear if "precision" in options else network
    made = task(model(), **options)
    made.train_step(0)
    kept = copy.deepcopy(made.state_dict())
    other = task(model(), **options)
    other.load_state_dict(kept)
    torch.rand(5)
    for each in (made, other):
        for step in range(1, 4):
            each.train_step(step)
    assert torch.equal(weights(made), weights(other)) and torch.equal(made.totals, other.totals)
    assert made.end_epoch() == other.end_epoch()


class Named(nn.Module):
    """A network that is no list of layers, and so has no length."""

    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, x):
        return self.layers(x)


def test_a_compiled_network_trains_and_goes_on_as_the_model_does():
    def compiled():
        model = Named()
        return task(model, network=torch.compile(model, backend="eager"), ema=0.5)

    made, plain = compiled(), task(Named(), ema=0.5)
    for each in (made, plain):
        each.train_step(0)
    kept = made.state_dict()
    assert kept["model"].keys() == plain.state_dict()["model"].keys()  # those of the model itself
    other = compiled()
    other.load_state_dict(copy.deepcopy(kept))
    for each in (made, plain, other):
        each.train_step(1)
    assert torch.equal(weights(made), weights(other))
    torch.testing.assert_close(weights(made), weights(plain))
