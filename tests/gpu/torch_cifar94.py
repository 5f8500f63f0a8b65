"""PyTorch's counterpart of `cifar_recipes.py`: the network, optimizer, augmentation and evaluation of Jordan 2024 (arXiv 2404.00498) with Muon, as
the documentation of the recipe `cifar-94` describes them, on the same pictures. Prints a line of JSON per seed, then mean and
standard deviation. Whole training runs are timed by CUDA events, after a warm-up run.

    python3 torch_cifar94.py --pictures cifar10 --seeds 50
"""

import json
import pathlib

import torch
from torch import nn
from torch.nn import functional

from cifar_recipes import print_summary
from options import parse_options

BATCH, EPOCHS, SMOOTHING = 2000, 8, 0.2
FILTER_LR, BIAS_LR, HEAD_LR = 0.24, 0.053, 0.67
FILTER_MOMENTUM, MOMENTUM = 0.6, 0.85
DECAY = 2e-6 * BATCH
BIAS_EPOCHS = 3


def norm(channels):
    layer = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    layer.weight.requires_grad = False
    return layer


class Group(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm(outputs)
        for conv in (self.conv1, self.conv2):
            nn.init.dirac_(conv.weight.data[: conv.in_channels])

    def forward(self, x):
        x = functional.gelu(self.norm1(functional.max_pool2d(self.conv1(x), 2)))
        return functional.gelu(self.norm2(self.conv2(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.whiten = nn.Conv2d(3, 24, 2)
        self.whiten.weight.requires_grad = False
        self.groups = nn.Sequential(Group(24, 64), Group(64, 256), Group(256, 256))
        self.head = nn.Linear(256, 10, bias=False)
        self.head.weight.data /= self.head.weight.data.std()

    def forward(self, x):
        x = self.groups(functional.gelu(self.whiten(x)))
        return self.head(functional.max_pool2d(x, 3).flatten(1)) / 256

    def whiten_by(self, pictures):
        """Sets the filters: eigenvectors of the second moments of 2x2 patches, divided by the roots of their eigenvalues, with both signs."""
        patches = functional.unfold(pictures.float(), 2).transpose(1, 2).reshape(-1, 12)
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = (vectors / (values + 5e-4).sqrt()).T.reshape(12, 3, 2, 2)
        self.whiten.weight.data.copy_(torch.cat([filters, -filters]))


@torch.compile
def orthogonalise(matrix):
    """Replaces all singular values by values near 1, by three Newton-Schulz iterations with Muon's coefficients."""
    x = matrix.bfloat16()
    x = x / (x.norm() + 1e-7)
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    for _ in range(3):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


class Muon:
    def __init__(self, filters):
        self.filters = [(weight, torch.zeros_like(weight)) for weight in filters]

    @torch.no_grad()
    def step(self, lr):
        for weight, velocity in self.filters:
            velocity.mul_(FILTER_MOMENTUM).add_(weight.grad)
            update = orthogonalise((weight.grad + FILTER_MOMENTUM * velocity).flatten(1)).view_as(weight)
            weight.mul_(len(weight) ** 0.5 / weight.norm()).sub_(lr * update)


def crop(padded, shifts):
    """Returns a window of 32 x 32 of each padded picture, at its shift."""
    windows = torch.empty_like(padded[:, :, :32, :32])
    for y in range(5):
        for x in range(5):
            chosen = (shifts[0] == y) & (shifts[1] == x)
            windows[chosen] = padded[chosen, :, y : y + 32, x : x + 32]
    return windows


def average_logits(net, pictures):
    """Returns the weighted mean of six views' logits: the pictures (half the weight) and two diagonal shifts, each also mirrored."""
    padded, logits = functional.pad(pictures, (1,) * 4, "reflect"), 0
    for y, weight in ((1, 0.5), (0, 0.25), (2, 0.25)):
        view = padded[:, :, y : y + 32, y : y + 32]
        logits = logits + weight / 2 * (net(view).clone() + net(view.flip(-1)))
    return logits


def run(net, pictures, labels, test, seed):
    """Trains once. `test`: pictures and labels. Returns the accuracy in percent, and the seconds of training without evaluation."""
    torch.manual_seed(seed)
    # Keeps the parameters' memory, so that the compiled network is reused.
    net.load_state_dict(Net().to("cuda", torch.float16).state_dict())
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    net.whiten_by(pictures[torch.arange(2000, device="cuda") * len(pictures) // 2000])
    biases = [module.bias for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    groups = [
        {"params": [net.whiten.bias], "lr": BIAS_LR, "weight_decay": DECAY / BIAS_LR},
        {"params": biases, "lr": BIAS_LR, "weight_decay": DECAY / BIAS_LR},
        {"params": [net.head.weight], "lr": HEAD_LR, "weight_decay": DECAY / HEAD_LR},
    ]
    sgd = torch.optim.SGD(groups, momentum=MOMENTUM, nesterov=True, fused=True)
    rates = [group["lr"] for group in groups]
    muon = Muon([p for p in net.parameters() if p.ndim == 4 and p.requires_grad])
    flipped = torch.rand(len(pictures), device="cuda") < 0.5
    first = torch.where(flipped.view(-1, 1, 1, 1), pictures.flip(-1), pictures)
    padded = functional.pad(first, (2,) * 4, "reflect")
    net.train()
    steps_per_epoch = len(pictures) // BATCH
    steps, bias_steps, step = EPOCHS * steps_per_epoch, BIAS_EPOCHS * steps_per_epoch, 0
    for epoch in range(EPOCHS):
        crops = crop(padded, torch.randint(5, (2, len(padded)), device="cuda"))
        crops = crops.flip(-1) if epoch % 2 else crops
        for chosen in torch.randperm(len(crops), device="cuda").split(BATCH)[:steps_per_epoch]:
            functional.cross_entropy(net(crops[chosen]), labels[chosen], label_smoothing=SMOOTHING, reduction="sum").backward()
            remaining = 1 - step / steps
            for group, rate in zip(sgd.param_groups, rates):
                group["lr"] = rate * remaining
            sgd.param_groups[0]["lr"] = BIAS_LR * max(0.0, 1 - step / bias_steps)
            sgd.step()
            muon.step(FILTER_LR * remaining)
            net.zero_grad(set_to_none=True)
            step += 1
    end.record()
    net.eval()
    with torch.no_grad():
        predicted = torch.cat([average_logits(net, part).argmax(1) for part in test[0].split(2000)])
    torch.cuda.synchronize()
    return (predicted == test[1]).float().mean().item() * 100, begin.elapsed_time(end) / 1000


def main():
    # `seeds`: the number of runs.
    options = parse_options(pictures=str, seeds=10)
    torch.backends.cudnn.benchmark = True
    loaded = [torch.load(pathlib.Path(options.pictures) / f"{split}.pt") for split in ("train", "test")]
    train = loaded[0]["images"].float() / 255
    mean, std = (statistic(train, (0, 1, 2)).view(1, 3, 1, 1).cuda() for statistic in (torch.mean, torch.std))

    def prepare(split):
        images = split["images"].cuda().permute(0, 3, 1, 2).float() / 255
        return ((images - mean) / std).half().contiguous(memory_format=torch.channels_last), split["labels"].cuda()

    (pictures, labels), test = map(prepare, loaded)
    net = Net().to("cuda", torch.float16).to(memory_format=torch.channels_last)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    net.compile(mode="max-autotune")
    run(net, pictures, labels, test, 0)
    rows = []
    for seed in range(1, options.seeds + 1):
        accuracy, secs = run(net, pictures, labels, test, seed)
        rows.append({"side": "pytorch", "run": "cifar-94", "seed": seed, "accuracy": round(accuracy, 2), "train_secs": round(secs, 3)})
        print(json.dumps(rows[-1]), flush=True)
    print_summary("pytorch", "cifar-94", rows)


if __name__ == "__main__":
    main()
