"""Writes PyTorch's results to `fixtures/`. Needs torch, torchvision, numpy and safetensors:

    python3 tests/pytorch/make_fixtures.py

With names of PARTS (`python3 tests/pytorch/make_fixtures.py grouped training`) only the files of these parts are written.

Operations are computed in float64 from float32 inputs, so the fixtures are exact to float32's last bit.
Training runs use float32, as users' jobs do. Inputs and weights come from `generator.py`, in Rust from its counterpart.
"""

import hashlib
import json
import pathlib
import sys

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file
from torch.optim.swa_utils import AveragedModel
from torchvision.transforms import v2

from generator import labels, parameter, values
from models import CIFAR_FAMILY, RESNETS, RESNEXTS_AND_WIDE, build

HERE = pathlib.Path(__file__).parent / "fixtures"
torch.set_num_threads(1)


def tensor(array):
    return torch.from_numpy(np.array(array, dtype=np.float64)).requires_grad_()


def nchw(array):
    return tensor(array.transpose(0, 3, 1, 2))


def store(out, key, value):
    """Stores a tensor; activations (4-d) are stored as NHWC."""
    array = value.detach().numpy()
    if array.ndim == 4 and not key.endswith(".dw"):
        array = array.transpose(0, 2, 3, 1)
    out[key] = np.ascontiguousarray(array, dtype=np.float32)


CONVOLUTIONS = [  # batch, side, in, out, kernel, stride
    (2, 9, 3, 16, 3, 1),
    (2, 15, 3, 64, 7, 2),
    (3, 8, 16, 16, 3, 1),
    (2, 9, 16, 32, 3, 2),
    (2, 8, 16, 32, 1, 2),
    (1, 7, 64, 64, 3, 1),
    (2, 5, 64, 128, 1, 1),
    (2, 6, 24, 10, 3, 2),
    (5, 1, 32, 32, 3, 1),
    (1, 6, 1, 16, 3, 1),
]


def convolutions(out):
    for batch, side, cin, cout, kernel, stride in CONVOLUTIONS:
        name = f"conv.{batch}.{side}.{cin}.{cout}.{kernel}.{stride}"
        x = nchw(values(name + ".x", batch, side, side, cin))
        w = tensor(values(name + ".w", cout, cin, kernel, kernel))
        y = F.conv2d(x, w, stride=stride, padding=kernel // 2)
        dy = values(name + ".dy", batch, y.shape[2], y.shape[3], cout)
        y.backward(nchw(dy))
        store(out, name + ".y", y)
        store(out, name + ".dx", x.grad)
        store(out, name + ".dw", w.grad)


GROUPED = [  # batch, side, in, out, kernel, stride, groups
    # ResNeXts: 4, 8, 16 and 32 channels per group.
    (2, 5, 128, 128, 3, 1, 32),
    (2, 5, 64, 64, 3, 2, 8),
    (1, 5, 64, 64, 3, 1, 4),
    (1, 3, 64, 64, 3, 2, 2),
    # Unusual shapes.
    (3, 7, 6, 9, 3, 1, 3),
    (2, 9, 20, 10, 3, 2, 5),
    (1, 6, 48, 48, 3, 2, 2),
    (2, 5, 64, 32, 1, 1, 4),
    (2, 7, 32, 32, 5, 2, 32),
    (5, 1, 32, 64, 3, 1, 2),
]


def grouped(out):
    for batch, side, cin, cout, kernel, stride, groups in GROUPED:
        name = f"grouped.{batch}.{side}.{cin}.{cout}.{kernel}.{stride}.{groups}"
        x = nchw(values(name + ".x", batch, side, side, cin))
        w = tensor(values(name + ".w", cout, cin // groups, kernel, kernel))
        y = F.conv2d(x, w, stride=stride, padding=kernel // 2, groups=groups)
        y.backward(nchw(values(name + ".dy", batch, y.shape[2], y.shape[3], cout)))
        store(out, name + ".y", y)
        store(out, name + ".dx", x.grad)
        store(out, name + ".dw", w.grad)


NORMS = [  # batch, side, channels, relu, shortcut, offset of the inputs' mean
    (3, 5, 16, False, False, 0.0),
    (3, 5, 16, True, False, 20.0),
    (3, 5, 16, True, True, 0.0),
    (2, 7, 64, True, True, -30.0),
    (2, 7, 64, True, False, 0.0),
    (2, 4, 128, True, True, 0.0),
    (2, 4, 128, False, True, 5.0),
    (2, 5, 24, True, True, 0.0),
    (2, 5, 24, True, False, 3.0),
    (33, 9, 32, True, True, 1.0),
]


def batch_norms(out):
    for batch, side, channels, relu, shortcut, offset in NORMS:
        name = f"norm.{batch}.{side}.{channels}.{int(relu)}.{int(shortcut)}.{int(offset)}"
        shape = (batch, side, side, channels)
        x = nchw(values(name + ".x", *shape) + np.float32(offset))
        s = nchw(values(name + ".s", *shape))
        gamma, beta = tensor(values(name + ".gamma", channels)), tensor(values(name + ".beta", channels))
        mean = tensor(values(name + ".mean", channels)).detach()
        var = tensor(values(name + ".var", channels) + np.float32(1)).detach()
        y = F.batch_norm(x, mean, var, gamma, beta, training=True)
        if shortcut:
            y = y + s
        if relu:
            y = torch.relu(y)
        y.backward(nchw(values(name + ".dy", *shape)))
        small = batch < 10
        if small:
            store(out, name + ".y", y)
            store(out, name + ".dx", x.grad)
            if shortcut:
                store(out, name + ".ds", s.grad)
        for key, value in (("mean", mean), ("var", var), ("dgamma", gamma.grad), ("dbeta", beta.grad)):
            store(out, f"{name}.{key}", value)


def pools(out):
    for batch, side, channels in ((2, 8, 16), (1, 7, 64), (2, 5, 24)):
        name = f"max_pool.{batch}.{side}.{channels}"
        # A coarse grid and a ReLU, for ties.
        x = nchw(np.maximum(np.round(values(name + ".x", batch, side, side, channels) * 4), 0))
        y = F.max_pool2d(x, 3, 2, 1)
        y.backward(nchw(values(name + ".dy", batch, y.shape[2], y.shape[3], channels)))
        store(out, name + ".y", y)
        store(out, name + ".dx", x.grad)
        name = f"average_pool.{batch}.{side}.{channels}"
        x = nchw(values(name + ".x", batch, side, side, channels))
        y = F.adaptive_avg_pool2d(x, 1)
        y.backward(nchw(values(name + ".dy", batch, 1, 1, channels)))
        store(out, name + ".y", y)
        store(out, name + ".dx", x.grad)


def linears(out):
    for batch, inputs, outputs in ((4, 64, 10), (3, 128, 33), (1, 64, 2)):
        name = f"linear.{batch}.{inputs}.{outputs}"
        x, w = tensor(values(name + ".x", batch, inputs)), tensor(values(name + ".w", outputs, inputs))
        b = tensor(values(name + ".b", outputs))
        y = F.linear(x, w, b)
        y.backward(tensor(values(name + ".dy", batch, outputs)))
        for key, value in (("y", y), ("dx", x.grad), ("dw", w.grad), ("db", b.grad)):
            store(out, f"{name}.{key}", value)


def losses(out):
    for batch, classes, smoothing, scale in ((8, 10, 0.0, 1), (8, 10, 0.1, 1), (3, 100, 0.05, 30), (4, 10, 0.0, 3000)):
        name = f"loss.{batch}.{classes}.{int(smoothing * 100)}.{scale}"
        x = tensor(values(name + ".x", batch, classes) * np.float32(scale))
        y = torch.from_numpy(labels(name + ".labels", batch, classes))
        loss = F.cross_entropy(x, y, label_smoothing=smoothing)
        loss.backward()
        store(out, name + ".loss", loss.reshape(1))
        store(out, name + ".dx", x.grad)
        store(out, name + ".correct", (x.argmax(1) == y).sum().reshape(1).double())


def class_weights():
    """Losses with class weights: with and without label smoothing, and with mixed labels as probabilities."""
    cases = []
    for smoothing, share in ((0.0, None), (0.1, None), (0.0, 0.75), (0.1, 0.25)):
        batch, classes = 6, 5
        name = f"class_weights.{len(cases)}"
        x = tensor(values(name + ".x", batch, classes) * np.float32(3))
        weight = torch.from_numpy((values(name + ".weights", classes) + np.float32(1.5)).astype(np.float64))
        target = torch.from_numpy(labels(name + ".labels", batch, classes))
        if share is not None:
            other = torch.from_numpy(labels(name + ".others", batch, classes))
            target, other = (F.one_hot(each, classes).double() for each in (target, other))
            target = share * target + (1 - share) * other
        loss = F.cross_entropy(x, target, weight=weight, label_smoothing=smoothing)
        loss.backward()
        cases.append({"smoothing": smoothing, "lambda": share, "loss": loss.item(), "dx": x.grad.flatten().tolist()})
    write("class_weights.json", json.dumps(cases, indent=1) + "\n")


def optimizers(out):
    for nesterov in (False, True):
        name = f"sgd.{int(nesterov)}"
        w = tensor(values(name + ".w", 50))
        sgd = torch.optim.SGD([w], lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=nesterov)
        for step in range(3):
            w.grad = tensor(values(f"{name}.g{step}", 50)).detach()
            sgd.step()
        store(out, name + ".w", w)
        store(out, name + ".v", sgd.state[w]["momentum_buffer"])


def fill(model, arch):
    """Sets weights, biases and statistics of `model` from the generator, as the Rust tests do."""
    state = model.state_dict()
    for name, value in state.items():
        if name.endswith("num_batches_tracked"):
            continue
        # With the fan-out of a grouped convolution, the logits would hardly depend on the pictures.
        fan_axis = 1 if arch in RESNEXTS_AND_WIDE else 0
        drawn = parameter(arch, name, value.shape, state["fc.weight"].shape[1], fan_axis)
        state[name] = torch.from_numpy(drawn).to(value.dtype)
    model.load_state_dict(state)


def architectures(arches):
    """Names and shapes of architectures, and logits of two pictures in evaluation mode.

    For larger architectures, the hash of names and shapes replaces their long list.
    """
    out = {}
    for arch in arches:
        entry = {}
        for stem, side, channels in (("imagenet", 64, 3), ("cifar", 17, 1)):
            if stem == "imagenet" and arch in CIFAR_FAMILY:
                continue
            # All architectures share the code of the stem, so the largest are recorded with one stem.
            if stem == "cifar" and "101" in arch and arch in RESNEXTS_AND_WIDE:
                continue
            model = build(arch, 1000 if stem == "imagenet" else 10, stem, channels).double().eval()
            fill(model, arch)
            images = values(f"{arch}.{stem}.images", 2, side, side, channels)
            with torch.no_grad():
                logits = model(nchw(images))[:, :10]
            parameters = [[name, list(value.shape)] for name, value in model.state_dict().items() if not name.endswith("tracked")]
            if arch in RESNEXTS_AND_WIDE:
                lines = "".join(f"{name} {'x'.join(map(str, shape))}\n" for name, shape in parameters)
                parameters = {"parameters_sha256": hashlib.sha256(lines.encode()).hexdigest()}
            else:
                parameters = {"parameters": parameters}
            entry[stem] = {
                "image_size": side,
                "channels": channels,
                "classes": 1000 if stem == "imagenet" else 10,
                "logits": [[float(np.float32(v)) for v in row] for row in logits.numpy()],
                **parameters,
            }
        out[arch] = entry
    return json.dumps(out, separators=(",", ":")).replace(',["', ',\n["') + "\n"


def learnable_batch(arch, step, batch, side):
    """Returns the pictures and labels of a step. The pictures of a class are a pattern with noise, which can be learned."""
    target = labels(f"{arch}.labels.{step}", batch, 10)
    images = values(f"{arch}.images.{step}", batch, side, side, 3) * np.float32(0.5)
    images += values(f"{arch}.patterns", 10, side, side, 3)[target]
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))), torch.from_numpy(target)


def samples(tensor):
    """Returns 16 values of a tensor at indices that are spread over it."""
    flat = tensor.flatten()
    return flat[torch.arange(16) * (flat.numel() - 1) // 15].tolist()


def training():
    """Losses of 20 steps of SGD, batch by batch, in float32. A run in float64 shows the effect of rounding."""
    out = {}
    for arch, batch, side, lr in (("resnet20", 32, 32, 0.005), ("resnet18", 8, 32, 0.001)):
        runs = {}
        for dtype in (torch.float32, torch.float64):
            model = build(arch).to(dtype).train()
            fill(model, arch)
            sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
            run = []
            for step in range(20):
                x, y = learnable_batch(arch, step, batch, side)
                loss = F.cross_entropy(model(x.to(dtype)), y)
                sgd.zero_grad()
                loss.backward()
                sgd.step()
                run.append(loss.item())
            runs[dtype] = run
        difference = max(abs(a - b) / b for a, b in zip(*runs.values()))
        print(f"{arch}: float32 and float64 differ by at most {difference:.1e}; losses {runs[torch.float32]}")
        out[arch] = {"batch_size": batch, "image_size": side, "lr": lr, "losses": runs[torch.float32]}
    write("training.json", json.dumps(out, indent=1) + "\n")


def step():
    """Steps of SGD of a network with grouped convolutions: losses, and the momentum buffers after the first step, in float64."""
    arch, batch, side, lr = "resnext50_32x4d", 8, 32, 0.001
    names = ["conv1", *(f"layer{n}.0.conv2" for n in range(1, 5)), "layer4.2.conv2", "layer2.0.downsample.0", "fc"]
    runs = {}
    for dtype in (torch.float32, torch.float64):
        model = build(arch).to(dtype).train()
        fill(model, arch)
        # A deep network is well-conditioned only if its blocks are close to the identity.
        with torch.no_grad():
            for name, value in model.named_parameters():
                if name.endswith("bn3.weight"):
                    value *= 0.125
        sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
        losses, momentum = [], {}
        for step in range(3):
            x, y = learnable_batch(arch, step, batch, side)
            loss = F.cross_entropy(model(x.to(dtype)), y)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            losses.append(loss.item())
            if step == 0:
                for name in names:
                    buffer = sgd.state[model.get_parameter(f"{name}.weight")]["momentum_buffer"].flatten().double()
                    # The samples include every group.
                    momentum[f"{name}.weight"] = {"norm": buffer.norm().item(), "values": samples(buffer)}
        runs[dtype] = losses, momentum
    (losses, momentum), (exact, exact_momentum) = runs.values()
    difference = max(abs(a - b) / b for a, b in zip(losses, exact))
    momentum_differences = {
        name: max(abs(a - b) for a, b in zip(entry["values"], exact_momentum[name]["values"])) / entry["norm"]
        for name, entry in momentum.items()
    }
    print(f"{arch}: float32 and float64 differ by at most {difference:.1e}; losses {losses}; momentum differs by {momentum_differences}")
    out = {"arch": arch, "batch_size": batch, "image_size": side, "lr": lr, "losses": exact, "momentum": exact_momentum}
    write("grouped_step.json", json.dumps(out, indent=1) + "\n")


class Unfused(torch.nn.Module):
    """A network with a ReLU, an addition, poolings and a hidden linear layer that follow no batch norm, so they are not fused with one."""

    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.conv2 = torch.nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.conv3 = torch.nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False)
        self.bn3 = torch.nn.BatchNorm2d(32)
        self.hidden = torch.nn.Linear(32, 24)
        self.fc = torch.nn.Linear(24, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x) + x)
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        x = F.relu(self.bn3(self.conv3(x)))
        return self.fc(F.relu(self.hidden(x.mean((2, 3)))))


def unfused():
    """Logits, loss and gradients of a step of `Unfused`, in float64."""
    batch, side = 8, 12
    model = Unfused().double().train()
    with torch.no_grad():
        for name, value in model.named_parameters():
            drawn = torch.from_numpy(values(f"unfused.{name}", value.numel()).reshape(value.shape)).double()
            value.copy_(drawn / 4 + (1.0 if name == "bn3.weight" else 0.0))
    logits = model(nchw(values("unfused.images", batch, side, side, 3)).detach())
    loss = F.cross_entropy(logits, torch.from_numpy(labels("unfused.labels", batch, 10)))
    loss.backward()
    gradients = {}
    for name, value in model.named_parameters():
        gradients[name] = {"norm": value.grad.norm().item(), "values": samples(value.grad)}
    running = {name: value.tolist() for name, value in model.named_buffers() if "running" in name}
    out = {
        "batch_size": batch, "image_size": side, "loss": loss.item(), "gradients": gradients, "running": running,
    }
    write("unfused.json", json.dumps(out).replace('}, "', '},\n"') + "\n")


class Lamb(torch.optim.Optimizer):
    """Algorithm 2 of You et al. 2019 (arXiv 1904.00962) with bias correction; the trust ratio as in timm's
    `Lamb(always_adapt=True, max_grad_norm=None)`. For a parameter group with `adapt=False` it is 1."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, adapt=True))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                m, v = state["m"], state["v"]
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                m_hat = m / (1 - beta1 ** state["step"])
                v_hat = v / (1 - beta2 ** state["step"])
                update = m_hat / (v_hat.sqrt() + group["eps"]) + group["weight_decay"] * p
                w_norm, u_norm = p.norm().item(), update.norm().item()
                trust = w_norm / u_norm if group["adapt"] and w_norm > 0 and u_norm > 0 else 1.0
                p.sub_(update, alpha=group["lr"] * trust)


OPTIMIZERS = {"adamw": torch.optim.AdamW, "lamb": Lamb}


def optimizer_steps():
    """Returns the values of a parameter of 16 elements after each of 20 steps, in float32."""
    out = {}
    for kind, lr, decay, beta1, beta2, epsilon in (
        ("adamw", 0.01, 0.0, 0.9, 0.999, 1e-8),
        ("adamw", 0.1, 0.3, 0.8, 0.95, 1e-3),
        ("adamw", 0.01, 0.1, 0.0, 0.0, 1e-6),
        ("lamb", 0.01, 0.0, 0.9, 0.999, 1e-8),
        ("lamb", 0.1, 0.3, 0.8, 0.95, 1e-3),
        ("lamb", 0.01, 0.1, 0.0, 0.0, 1e-6),
    ):
        name = f"{kind}.{len(out)}"
        w = torch.from_numpy(values(name + ".w", 16)).requires_grad_()
        rule = OPTIMIZERS[kind]([w], lr=lr, betas=(beta1, beta2), eps=epsilon, weight_decay=decay)
        weights = []
        for step in range(20):
            rule.param_groups[0]["lr"] = lr * (1 - step / 40)
            scale = 0.0 if step % 7 == 6 else (1.0, 10.0, 1e-3)[step % 3]
            w.grad = torch.from_numpy(values(f"{name}.g{step}", 16) * np.float32(scale))
            rule.step()
            weights.append([float(v) for v in w.detach()])
        out[name] = {
            "optimizer": kind, "lr": lr, "weight_decay": decay, "beta1": beta1, "beta2": beta2, "epsilon": epsilon,
            "weights": weights,
        }
    return out


def optimizer_runs():
    """Losses of 20 steps of ResNet-20 as in `training`, with AdamW and LAMB, and weight decay of all parameters or only of the
    weights of convolutions and linear layers."""
    out = {}
    arch, batch, side, decay = "resnet20", 32, 16, 4.0
    for kind, lr in (("adamw", 1e-4), ("lamb", 3e-4)):
        for decay_norm_and_bias in (True, False):
            runs = {}
            for dtype in (torch.float32, torch.float64):
                model = build(arch).to(dtype).train()
                fill(model, arch)
                weights = [p for p in model.parameters() if p.ndim > 1]
                others = [p for p in model.parameters() if p.ndim <= 1]
                rule = OPTIMIZERS[kind]([{"params": weights}, {"params": others}], lr=lr, weight_decay=decay)
                if not decay_norm_and_bias:
                    rule.param_groups[1].update(weight_decay=0.0, adapt=False)
                run = []
                for step in range(20):
                    x, y = learnable_batch(arch, step, batch, side)
                    loss = F.cross_entropy(model(x.to(dtype)), y)
                    rule.zero_grad()
                    loss.backward()
                    rule.step()
                    run.append(loss.item())
                runs[dtype] = run
            name = kind if decay_norm_and_bias else f"{kind}, without decay of norms and biases"
            difference = max(abs(a - b) / b for a, b in zip(*runs.values()))
            print(f"{name}: float32 and float64 differ by at most {difference:.1e}; losses {runs[torch.float32]}")
            out[name] = {
                "optimizer": kind, "batch_size": batch, "image_size": side, "lr": lr, "weight_decay": decay,
                "decay_norm_and_bias": decay_norm_and_bias, "losses": runs[torch.float32],
            }
    return out


def optimizer_fixtures():
    write("optimizers.json", json.dumps({"steps": optimizer_steps(), "runs": optimizer_runs()}, indent=1) + "\n")


class Recorder:
    """Records the random numbers that torchvision's `MixUp` or `CutMix` draws for a batch, and the centre of a cut."""

    def make_params(self, inputs):
        drawn, randint, sample = [], torch.randint, self._dist.sample

        def recorded_sample(shape):
            self.drawn = sample(shape)
            return self.drawn

        torch.randint = lambda *args, **kwargs: drawn.append(randint(*args, **kwargs)) or drawn[-1]
        self._dist.sample = recorded_sample
        try:
            params = super().make_params(inputs)
        finally:
            torch.randint, self._dist.sample = randint, sample
        self.mix = {"lambda": params.get("lam_adjusted", params.get("lam"))}
        if "box" in params:
            x1, y1, x2, y2 = params["box"]
            self.mix.update(
                rows=[int(y1), int(y2)], columns=[int(x1), int(x2)],
                drawn=float(self.drawn), centre=[int(drawn[1]), int(drawn[0])],
            )
        return params


class RecordedMixUp(Recorder, v2.MixUp):
    pass


class RecordedCutMix(Recorder, v2.CutMix):
    pass


def mixing_and_average():
    """Losses of 20 steps of ResNet-20 as in `training`: with torchvision's MixUp and CutMix, whose random numbers are recorded, and with
    the moving average of torchvision's reference scripts."""
    out = {}
    arch, batch, side, lr, smoothing = "resnet20", 32, 16, 0.001, 0.1
    decay, every = 0.8, 3
    for name, mixing in (
        ("mixup", lambda: RecordedMixUp(alpha=0.8, num_classes=10)),
        ("cutmix", lambda: RecordedCutMix(alpha=1.0, num_classes=10)),
        ("average", lambda: None),
    ):
        runs = {}
        for dtype in (torch.float32, torch.float64):
            torch.manual_seed(1)
            mixer = mixing()
            model = build(arch).to(dtype).train()
            fill(model, arch)
            # torchvision's utils.ExponentialMovingAverage.
            average = AveragedModel(model, avg_fn=lambda a, value, _: decay * a + (1 - decay) * value, use_buffers=True)
            sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
            losses, mixes, pixels = [], [], []
            for step in range(20):
                x, y = learnable_batch(arch, step, batch, side)
                if mixer:
                    x, y = mixer(x, y)
                    mixes.append(mixer.mix)
                    pixels.append(samples(x.permute(0, 2, 3, 1)))
                y = y.to(dtype) if y.is_floating_point() else y
                loss = F.cross_entropy(model(x.to(dtype)), y, label_smoothing=smoothing)
                sgd.zero_grad()
                loss.backward()
                sgd.step()
                losses.append(loss.item())
                if (step + 1) % every == 0:
                    average.update_parameters(model)
            runs[dtype] = losses
            if dtype == torch.float32:
                entry = {"batch_size": batch, "image_size": side, "lr": lr, "losses": losses, "label_smoothing": smoothing}
                if mixer:
                    entry.update(mixes=mixes, pixels=pixels)
                else:
                    entry.update(decay=decay, every=every, tensors={})
                    for key, value in average.module.state_dict().items():
                        if key.endswith(("running_mean", "running_var", "conv1.weight", "fc.weight", "bn2.bias")):
                            flat = value.flatten().double()
                            entry["tensors"][key] = {"norm": flat.norm().item(), "values": samples(flat)}
                out[name] = entry
        difference = max(abs(a - b) / b for a, b in zip(*runs.values()))
        print(f"{name}: float32 and float64 differ by at most {difference:.1e}; losses {runs[torch.float32]}")
    write("mixing.json", json.dumps(out).replace(', "', ',\n"') + "\n")


def looking():
    """Probabilities, confusion matrix and loss of a synthetic model on synthetic grey pictures of one byte per pixel."""
    arch, count, side = "resnet20", 200, 16
    mean, std = np.float32(0.4), np.float32(0.3)
    model = build(arch, 10, "cifar", 1).double().eval()
    fill(model, arch)
    pictures = ((values("looking.pictures", count, side, side, 1) + 1) * np.float32(127.5)).astype(np.uint8)
    truth = labels("looking.labels", count, 10)
    x = (pictures.astype(np.float32) / np.float32(255) - mean) / std
    with torch.no_grad():
        # Logits of synthetic weights differ little between pictures, so they are scaled, and centred on their mean over all pictures.
        model.fc.weight *= 512
        bias = (model.fc.bias - model(nchw(x)).mean(0)).float()
        model.fc.bias.copy_(bias)
        logits = model(nchw(x))
    probabilities = F.softmax(logits, 1)
    confusion = np.zeros((10, 10), np.int64)
    for label, predicted in zip(truth, logits.argmax(1).numpy()):
        confusion[label, predicted] += 1
    out = {
        "count": count, "side": side, "mean": float(mean), "std": float(std), "bias": [float(b) for b in bias],
        "probabilities": [[round(float(v), 7) for v in row] for row in probabilities[:8].numpy()],
        "confusion": confusion.tolist(),
        "loss": F.cross_entropy(logits, torch.from_numpy(truth)).item(),
    }
    write("looking.json", json.dumps(out) + "\n")


MUON = [(8, 3, 3), (24, 2, 1), (16, 4, 2)]  # out, in, kernel


def muon():
    """Three steps of Muon for the filters of a convolution, in float64. Each step scales the weights to the norm sqrt(out) before the update."""
    out, momentum, lr = {}, 0.6, 0.1
    for shape in MUON:
        cout, cin, kernel = shape
        name = "muon." + ".".join(map(str, shape))
        w = torch.from_numpy(values(name + ".w", cout, cin * kernel * kernel).astype(np.float64))
        buffer, weights = torch.zeros_like(w), []
        for step in range(3):
            # The sizes of the gradients differ, but Muon's update does not depend on the size.
            g = torch.from_numpy(values(f"{name}.g{step}", *w.shape).astype(np.float64)) * [1.0, 1e-3, 10.0][step]
            buffer = momentum * buffer + g
            u = g + momentum * buffer
            u = u / (u.norm() + 1e-7)
            for _ in range(3):
                gram = u @ u.T
                u = 3.4445 * u + (-4.7750 * gram + 2.0315 * gram @ gram) @ u
            w = w * (cout**0.5 / w.norm()) - lr * u
            weights.append([float(np.float32(v)) for v in w.flatten()])
        out[name] = {"shape": shape, "momentum": momentum, "lr": lr, "weights": weights}
    write("muon.json", json.dumps(out, separators=(",", ":")).replace('"muon.', '\n"muon.') + "\n")


def write_tensors(name, parts):
    """Writes the tensors that these functions store."""
    out = {}
    for part in parts:
        part(out)
    save_file(out, HERE / name)


def write(name, text):
    (HERE / name).write_text(text)


PARTS = {
    "operations": lambda: write_tensors("operations.safetensors", (convolutions, batch_norms, pools, linears, losses, optimizers)),
    "grouped": lambda: write_tensors("grouped.safetensors", (grouped,)),
    "architectures": lambda: write("architectures.json", architectures([*RESNETS, *CIFAR_FAMILY])),
    "resnexts": lambda: write("resnexts.json", architectures(RESNEXTS_AND_WIDE)),
    "training": training,
    "step": step,
    "unfused": unfused,
    "optimizers": optimizer_fixtures,
    "muon": muon,
    "mixing": mixing_and_average,
    "class_weights": class_weights,
    "looking": looking,
}

if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
    for file in sorted(HERE.iterdir()):
        print(f"{file.name}: {file.stat().st_size} bytes")
