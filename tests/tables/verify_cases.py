"""Scripts in 65 styles for `verify`, each right, and each with mistakes.

    pytest --tables tests/rankcheck/test_verify.py  all of them, in minutes
    pytest --tables tests/rankcheck/test_verify.py -k "FSDP"  those so called

A right script must not be refused, and of a mistake the answer has to hold the
given words, which it must not hold of the right one. To extend the table, add
an entry.
"""

import contextlib
import io
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import edit

HERE = Path(__file__).resolve().parent


def read(name):
    return (HERE / "foreign" / f"{name}.py").read_text()


DDP = read("ddp")
ZERO = "        optimizer.zero_grad()\n"
LOSS = "        loss = nn.functional.mse_loss(model(x), y)\n"
BACKWARD = "        loss.backward()\n"
CLIP = "        nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n"
STEP = "        optimizer.step()\n"
REDUCE = """\
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
            weight.grad /= size
"""
BY_HAND = edit(
    DDP, ("model = DDP(nn.Sequential(", "model = (nn.Sequential("),
    (BACKWARD, BACKWARD + REDUCE))
COLUMNS = edit(
    DDP, ("mse_loss(model(x), y)", "mse_loss(model(x.T), y)"),
    ("nn.Sequential(nn", "nn.Sequential(Turned(), nn"), ("model = DDP(", """\
class Turned(nn.Module):
    def forward(self, x): return x.T
model = DDP("""))
IMAGES = edit(
    DDP, ("torch.randn(640, 10, gen", "torch.randn(640, 3, 8, 8, gen"),
    ("nn.Linear(10, 900), nn.ReLU(), nn.Dropout(0.2),",
     "nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.ReLU(),"),
    ("nn.Linear(900, 1)", "nn.Linear(144, 1)"))
IN_SYNC = edit(
    IMAGES, ("model = DDP(nn.Sequential(", "model = DDP(nn.SyncBatchNorm."
             "convert_sync_batchnorm(nn.Sequential("), ("144, 1)", "144, 1))"),
    ("nn.ReLU()", "nn.ReLU(inplace=True)"))
TWO = edit(
    DDP, ("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
          """class Both:
    def __init__(self, *optimizers): self.optimizers = optimizers
    def zero_grad(self): [one.zero_grad() for one in self.optimizers]
    def step(self): [one.step() for one in self.optimizers]
first, *others = model.parameters()
optimizer = Both(torch.optim.AdamW([first], lr=1e-3),
                 torch.optim.SGD(others, lr=0.1))"""))
FSDP2 = edit(
    DDP, ("nn.parallel import DistributedDataParallel as DDP",
          "distributed.fsdp import fully_shard"),
    ("(dataset)\n", "(dataset, shuffle=False)\n"),
    ("    sampler.set_epoch(epoch)\n", ""), ("= DDP(nn", "= (nn"),
    ("10, 900), nn.ReLU(), nn.Dropout(0.2),", "10, 17), nn.ReLU(),"),
    ("nn.Linear(900, 1)))\n", """nn.Linear(17, 1)))
for layer in (model[0], model[2], model):
    fully_shard(layer)
"""), ("SGD(model.parameters(), lr=0.1", "AdamW(model.parameters(), lr=1e-3"))
BEGIN = next(line for line in DDP.splitlines(True) if "dist.init" in line)
HSDP = edit(FSDP2, ("for layer in", """\
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("copies", "parts"))
for layer in"""), ("fully_shard(layer)", "fully_shard(layer, mesh=mesh)"))
META = edit(
    FSDP2, ("model = (nn", "with torch.device('meta'):\n    model = (nn"),
    ("optimizer = ", "model.to_empty(device='cpu')\n"
     "for layer in (model[0], model[2]): layer.reset_parameters()\n"
     "optimizer = "))
SPLIT = edit(
    FSDP2, (BEGIN, """\
import os
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import parallel
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
"""),
    ("(dataset, shuffle=False)", "(dataset, 1, 0, shuffle=False)"),
    ("batch_size=32 // size", "batch_size=32"),
    ("for layer in (model[0], model[2], model):\n    fully_shard(layer)\n",
     """parallel.parallelize_module(
    model, mesh,
    {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()})
"""), ("nn.Linear(10, 17)", "nn.Linear(10, 18)"),
    ("nn.Linear(17, 1)", "nn.Linear(18, 1)"))
SCALED = edit(
    DDP, ("SGD(model.parameters(), lr=0.1)", "Adam(model.parameters(), "
          "lr=1e-3)\nscaler = torch.amp.GradScaler('cpu')"),
    (LOSS + BACKWARD, """\
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
"""), ("optimizer.step()\n", "scaler.step(optimizer)\n"
       "        scaler.update()\n"))
LOOK = edit(DDP, ("    sampler.set_epoch(epoch)\n", """\
    len(next(iter(loader))[0])  # as PyTorch's tutorial does
    list(DataLoader(dataset, 32, sampler=DistributedSampler(dataset)))
    sampler.set_epoch(epoch)
"""))
ON_GPUS = edit(
    DDP, (BEGIN, """\
import os
from torch.distributed.optim import ZeroRedundancyOptimizer  # scripted
assert torch.cuda.is_available(), "needs a GPU"
local = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
torch.cuda.set_device(local)
device, side = torch.device("cuda", local), torch.cuda.Stream()
dist.init_process_group("nccl", device_id=device)
dist.reduce_scatter_tensor(torch.ones(1), torch.ones(dist.get_world_size()),
                           async_op=True).get_future().wait()
"""),
    ("sampler=sampler)", "sampler=sampler, pin_memory=True, num_workers=1)"),
    ("(900, 1)))", "(900, 1, device=device)).to(local), device_ids=[local])"),
    ("SGD(model.parameters(), lr=0.1)", "AdamW(model.parameters(), "
     "lr=1e-3, fused=True)\nscaler = torch.amp.GradScaler()"),
    (ZERO, """\
        with torch.cuda.stream(side): x = x.cuda(non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        y = y.to(f"cuda:{local}") + torch.zeros(1, device="cuda")
        optimizer.zero_grad()
"""),
    (LOSS + BACKWARD, """\
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
"""),
    ("optimizer.step()\n", """scaler.step(optimizer)
        scaler.update()
        assert f"{torch.cuda.max_memory_allocated() / 1e9:.2f}" == "0.00"
"""))
GPUS_SHARDED = edit(
    FSDP2, (BEGIN, """\
dist.init_process_group()
torch.accelerator.set_device_index(0)
torch.set_default_device(torch.accelerator.current_accelerator())
mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
"""), ("Generator()", 'Generator("cuda")'),
    ("fully_shard(layer)", "fully_shard(layer, mesh=mesh)"))
NET = DDP[DDP.index("model = "):DDP.index("optimizer = ")]
FEW = edit(DDP, ("torch.randn(640, 10, generator=g)",
                 "(torch.rand(640, 10, generator=g) < 0.1).float()"))
SMALL = edit(
    DDP, ("r = DistributedSampler(dataset)\n", "r = DistributedSampler("
          "dataset) if size > 1 else None\n"), ("batch_size=32 // size, ",
          "batch_size=32, shuffle=sampler is None, "),
    ("    sampler.set", "    if sampler: sampler.set"),
    ("torch.randn(640, 10", "torch.randn(80, 10"),
    ("torch.randn(640, 1,", "torch.randn(80, 1,"))
DERIVED = edit(DDP, (LOSS, "        x.requires_grad_()\n" + LOSS))
NOISE = edit(
    DDP, ("nn.Dropout(0.2)", "Noise()"), ("model = DDP(", """\
class Noise(nn.Module):
    def forward(self, x): return x + torch.randn_like(x)
model = DDP("""),
    ("optimizer = ", "torch.manual_seed(1 + rank)\noptimizer = "))
DROPPED = edit(
    DDP, ("nn.Dropout(0.2)", "Dropped(900, 900)"),
    ("900, 1)))", "900, 1)), find_unused_parameters=True)"),
    ("model = DDP(", """\
import random
random.seed(4)  # the first update is without it
class Dropped(nn.Linear):
    def forward(self, x):
        return super().forward(x) if random.random() < 0.2 else x
model = DDP("""))
ADDED = edit(
    BY_HAND, ("            weight.grad /= size\n", ""),
    ("mse_loss(model(x), y)", "mse_loss(model(x), y, reduction='sum') / 32"))
NO_MODULE = edit(BY_HAND, (NET.replace("DDP(", "("), """\
class Linear:
    weight = torch.zeros(10, 1, requires_grad=True)
    def parameters(self): return [self.weight]
    def __call__(self, x): return x @ self.weight
model = Linear()
"""))
LBFGS = edit(
    DDP, ("SGD(model.parameters(), lr=0.1)", "LBFGS(model.parameters(), 0.1)"),
    (DDP[DDP.index("        optimizer.zero_grad"):DDP.index("    if rank")],
     """\
        def closure():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss
        loss = optimizer.step(closure)
"""))
MIXED = edit(
    FSDP2, ("import fully_shard", "import fully_shard, MixedPrecisionPolicy"),
    ("fully_shard(layer)", "fully_shard(layer, mp_policy="
     "MixedPrecisionPolicy(torch.bfloat16, torch.float32))"),
    ("mse_loss(model(x), y)", "mse_loss(model(x).float(), y)"))
FLAT = edit(
    FSDP2, ("import fully_shard", "import FullyShardedDataParallel as FSDP"),
    ("for layer in (model[0], model[2], model):\n    fully_shard(layer)",
     'model = FSDP(model, device_id=torch.device("cpu"))'),
    ("nn.utils.clip_grad_norm_(model.parameters(), 0.5)",
     "model.clip_grad_norm_(0.5)"))
RECURRENT = edit(
    DDP, ("torch.randn(640, 10, gen", "torch.randint(65, (640, 10), gen"),
    (NET, """\
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru = nn.Embedding(65, 16), nn.GRU(16, 16)
        self.head = nn.Linear(16, 1)
    def forward(self, x, state):
        x, state = self.gru(self.embed(x), state)
        return self.head(x[-1]), state
model = DDP(Recurrent())
"""), (DDP[DDP.index("        optimizer.zero_grad"):DDP.index("    if rank")],
       """\
        state = torch.zeros(1, len(x), 16)
        for part in x.T.contiguous().split(3):  # the last has one
            optimizer.zero_grad()
            prediction, state = model(part, state.detach())
            loss = nn.functional.mse_loss(prediction, y)
            loss.backward()
            optimizer.step()
"""))
NUMPY = edit(
    BY_HAND, ("import torch\n", "import numpy\nimport torch\n"),
    ("(640, 10", "(640_000, 10"), ("(640, 1,", "(640_000, 1,"),
    ("    for x, y in loader:\n", """\
    for _ in range(20):  # as each process seeds itself
        x, y = dataset[numpy.random.randint(640_000, size=32 // size)]
"""))
TOKENS = edit(
    DDP, ("torch.randn(640, 1, generator=g)", "torch.randint(-3, 4, (640,), "
          "generator=g).clamp(min=-1)"), ("(900, 1)", "(900, 4)"),
    (LOSS, """\
        count = (y >= 0).sum()
        dist.all_reduce(count)
        loss = size / count * nn.functional.cross_entropy(
            model(x), y, ignore_index=-1, reduction="sum")
"""))
MICROBATCHES = edit(
    TOKENS, (TOKENS[TOKENS.index("        loss = size"):TOKENS.index(
        "        nn.utils.clip")], """\
        for half in (0, 1):
            loss = size / count * nn.functional.cross_entropy(
                model(x[half::2]), y[half::2], ignore_index=-1,
                reduction="sum")
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
"""), ("optimizer.step()\n", "scaler.step(optimizer)\n"
       "        scaler.update()\n"),
    ("optimizer = ", "scaler = torch.amp.GradScaler('cpu')\noptimizer = "))
WEIGHTED = edit(
    DDP, ("32 // size", "32"),
    (LOSS, """\
        weight = x[:, :1].abs()
        total = weight.sum()
        dist.all_reduce(total)
        loss = (weight * (model(x) - y).square()).sum() * size / total
"""))
CONTRASTIVE = edit(
    DDP, ("32 // size", "32"), ("(900, 1)", "(900, 4)"),
    (LOSS, """\
        mine = model(x)
        every = torch.cat(gather(mine))
        own = torch.arange(len(x)) + rank * len(x)
        loss = nn.functional.cross_entropy(mine @ every.T, own)
"""), ("import nn\n",
       "import nn\nfrom torch.distributed.nn.functional import all_gather as "
       "gather\n"))
SHARDED = edit(
    DDP, ("(dataset)\n", "(dataset, 1, 0)\n"), ("32 // size", "32"),
    ("manual_seed(0)\nmodel", "manual_seed(rank)\nmodel"),
    ("torch.manual_seed(r", """\
class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone())
        return x
    @staticmethod
    def backward(ctx, gradient): return gradient
class Sharded(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(10, 900 // size)
        self.down = nn.Linear(900 // size, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(1))
    def forward(self, x):
        return Sum.apply(self.down(self.up(x).relu())) + self.bias
torch.manual_seed(r"""), (NET, "model = Sharded()\n"),
    (CLIP, ""))
PARTS = edit(
    SHARDED.replace("900", "90"), ("manual_seed(rank)", "manual_seed(0)"),
    ("zeros(1)", "ones(1)"), ("        self.up = ", """\
        whole = nn.Linear(10, 90), nn.Linear(90, 1)
        self.up = """), ("    def forward(self, x):\n        return Sum", """\
        self.up.weight.data = whole[0].weight.data.chunk(size)[rank].clone()
        self.up.bias.data = whole[0].bias.data.chunk(size)[rank].clone()
        self.down.weight.data = whole[1].weight.data.chunk(
            size, 1)[rank].clone()
    def forward(self, x):
        return Sum"""))
UNFROZEN = edit(
    DDP, ("model = DDP(nn", "model = (nn"), ("optimizer = ", """\
model[0].requires_grad_(False)
model = DDP(model)
step = 0
optimizer = """), (ZERO, """\
        if step == 2:
            model.module[0].requires_grad_(True)
            model = DDP(model.module)
        step += 1
""" + ZERO))
SKIPS = edit(
    DDP, ("torch.randn(640, 1,", "30 * torch.randn(640, 1,"),
    ("SGD(model.parameters(), lr=0.1", "AdamW(model.parameters(), lr=1e-3"),
    ("optimizer = ", "scaler = torch.amp.GradScaler('cpu')\noptimizer = "),
    (LOSS + BACKWARD + CLIP + STEP, """\
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""))
FUNCTIONS = edit(
    BY_HAND, ("nn.Linear(900, 1)))\n", """nn.Linear(900, 1)))
weights = {name: weight.detach() for name, weight in model.named_parameters()}
def loss_of(weights, x, y):
    return nn.functional.mse_loss(
        torch.func.functional_call(model, weights, x), y)
"""), (LOSS + BACKWARD, """\
        gradients, loss = torch.func.grad_and_value(loss_of)(weights, x, y)
        for name, weight in model.named_parameters():
            weight.grad = gradients[name]
"""))
IN_BACKWARD = edit(
    BY_HAND, ("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n", """\
optimizers = {weight: torch.optim.SGD([weight], lr=0.1)
              for weight in model.parameters()}
def update(weight):
    dist.all_reduce(weight.grad)
    weight.grad /= size
    optimizers[weight].step()
    optimizers[weight].zero_grad()
for weight in model.parameters():
    weight.register_post_accumulate_grad_hook(update)
"""), (ZERO, ""), (BACKWARD + REDUCE + CLIP + STEP, BACKWARD))
STYLES = {"DDP": DDP, "token mean": TOKENS, "microbatches": MICROBATCHES,
          "sharded by hand": SHARDED, "parts by hand": PARTS,
          "unfrozen": UNFROZEN, "skipped updates": SKIPS,
          "uneven": edit(DDP, ("randn(640, 10", "randn(50, 10"),
                         ("randn(640, 1,", "randn(50, 1,"),
                         ("batch_size=32", "batch_size=25")),
          "two updates": edit(DDP, ("torch.randn(640, 10", "torch.randn(64, 10"
                                    ), ("randn(640, 1,", "randn(64, 1,"),
                              ("range(100)", "range(1)"),
                              ("raise SystemExit", "#")),
          "token mean, more": edit(TOKENS, ("32 // size", "32")),
          "weighted mean": WEIGHTED, "contrastive": CONTRASTIVE,
          "no seed": edit(DDP, ("manual_seed(0)\nmodel", "rand(1)\nmodel")),
          "FSDP2, no seed": edit(FSDP2, ("torch.manual_seed(0)",
                                         "torch.rand(1)")),
          "FSDP2, meta": META,
          "torchrun's variables": edit(DDP, ("dist.init_process_group(", """\
import os
assert dist.is_torchelastic_launched(), "start me by torchrun"
assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
assert os.environ["GROUP_WORLD_SIZE"] == "1"
dist.init_process_group(""")),
          "rank as a flag": edit(
              DDP, ("rank, size = dist.get_rank()", """\
import sys
assert int(sys.argv[1]) == dist.get_rank()
rank, size = int(sys.argv[1])"""), ("32 // size", "int(sys.argv[2])")),
          "DDP, a look": LOOK, "NumPy": NUMPY,
          "recurrent": RECURRENT, "few values": FEW, "few samples": SMALL,
          "columns": COLUMNS,
          "derivatives": DERIVED, "noise": NOISE, "layers dropped": DROPPED,
          "losses added": ADDED, "no module": NO_MODULE, "closure": LBFGS,
          "many updates": edit(DDP, ("SGD(", "Adam(")),
          "mixed precision": MIXED, "FSDP1": FLAT, "by hand": BY_HAND,
          "images": IMAGES, "SyncBatchNorm": IN_SYNC, "two optimizers": TWO,
          "FSDP2": FSDP2, "HSDP": HSDP, "tensor parallel": SPLIT,
          "GradScaler": SCALED,
          "several alone": edit(DDP, ("g = torch.Gen", "assert size > 1\n"
                                      "g = torch.Gen")),
          "tensor parallel alone": edit(SPLIT, (
              "mesh = init", "assert os.environ['WORLD_SIZE'] > '1'\n"
              "mesh = init")),
          "local SGD": edit(BY_HAND, (REDUCE, ""), (STEP, STEP + """\
        for weight in model.parameters():
            if step % 2:
                dist.all_reduce(weight.data)
                weight.data /= size
        step += 1
"""), ("for epoch", "step = 0\nfor epoch")),
          "taken": edit(BY_HAND, (LOSS + BACKWARD, """\
        for weight in model.parameters(): weight.main = 0
        for half in (0, 1):
            (nn.functional.mse_loss(model(x[half::2]), y[half::2]) / 2
             ).backward()
            for weight in model.parameters():
                weight.main, weight.grad = weight.main + weight.grad, None
        for weight in model.parameters(): weight.grad = weight.main
"""), (STEP, "        model[3].bias.grad = None\n" + STEP)),
          "functions": FUNCTIONS, "in backward": IN_BACKWARD,
          "by step": edit(
              DDP, ("model = DDP(nn", "model = (nn"), ("SGD(", "Reducing("),
              (CLIP, ""), ("optimizer = torch.optim.", """\
class Reducing(torch.optim.SGD):
    def step(self):
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
            weight.grad /= size
        super().step()
optimizer = """)),
          "on GPUs alone": edit(DDP, ("model = DDP(nn", "model = (nn"), (
              "optimizer = ", """\
if torch.cuda.is_available(): model = DDP(model.cuda())
optimizer = """)),
          "split": edit(DDP, ("sampler = ", """\
torch.manual_seed(3)
dataset, rest = torch.utils.data.random_split(dataset, [0.8, 0.2])
sampler = """)),
          "clamped": edit(DDP, (STEP, STEP + """\
        for weight in model.parameters(): weight.data.clamp_(-0.1, 0.1)
""")),
          "EMA": edit(DDP, ("optimizer = ", """\
import copy
average = copy.deepcopy(model.module).requires_grad_(False)
optimizer = """), (STEP, STEP + """\
        for mine, new in zip(average.parameters(), model.parameters()):
            mine.lerp_(new.data, 0.1)
""")),
          "files": edit(DDP, (STEP, STEP + """\
        if rank == 0:
            os.makedirs("runs/a", exist_ok=True)
            torch.save(x, "runs/a/model.pt")
            open(b"log.txt", "a").write("x")  # as TensorBoard does
"""), ("import torch\n", "import os\nimport torch\n")),
          "GPUs": ON_GPUS, "GPUs, sharded": GPUS_SHARDED,
          "starter": (HERE.parents[1] / "starter/train.py").read_text()} | {
    style: read(name) for style, name in (
        ("nanoGPT", "nano"), ("minGPT", "mingpt"),
        ("Accelerate", "accelerated"), ("HF Trainer", "hf"),
        ("Lightning", "lightning_trainer"), ("GAN", "gan"),
        ("tables", "tables"), ("pipeline by hand", "pipeline"),
        ("workers", "stream"))}
STYLES["HF Trainer, no seed"] = edit(
    STYLES["HF Trainer"], ("torch.manual_seed(0)\n", ""))
FLAGS = {"rank as a flag": ["{rank}", "{32/n}"],
         "HF Trainer": ["run-{run}"], "HF Trainer, no seed": ["run-{run}"],
         "minGPT": ["snapshot-{run}.pt"],
         "starter": ["--run-dir", "run-{run}", "--checkpoint-every", "2"]}
STEPS = {"many updates": 60}
RESUMES = {"starter": "--resume", "HF Trainer": "resume",
           "HF Trainer, no seed": "resume", "minGPT": ""}


@dataclass(frozen=True)
class Case:
    style: str
    mistake: str  # "" where it is right
    says: tuple  # words of the answer
    changes: tuple = ()  # pairs (old, new)
    resumes: bool = False

    @property
    def name(self):
        return (f"{self.style}{' resume' * self.resumes}: "
                f"{self.mistake or 'right'}")


def right(style, *says, resumes=False):
    return Case(style, "", says, (), resumes)


def wrong(style, mistake, says, *changes, resumes=False):
    return Case(style, mistake, (says,), changes, resumes)


def outcome(case, folder):
    """(exit status, what it prints), run in an empty folder."""
    from rankcheck.verification.command import verify

    script = Path(folder, "their_train.py")
    text = edit(STYLES[case.style], *case.changes)
    script.write_text(text)
    with (pytest.MonkeyPatch.context() as patch,
          contextlib.redirect_stdout(io.StringIO()) as out):
        patch.chdir(folder)
        right = verify([str(script), *FLAGS.get(case.style, [])], 2,
                       STEPS.get(case.style, 4),
                       RESUMES[case.style] if case.resumes else None)
    assert script.read_text() == text
    left = os.listdir(folder)
    assert case.mistake or left == [script.name], left
    return int(not right), out.getvalue()


def problem(case, status, out):
    """What is not as the case says, "" where all is."""
    if not case.mistake and (status or "FAIL" in out):
        return "refused"
    if status != ("FAIL" in out):
        return f"status {status}"
    missing = [words for words in case.says if words not in out]
    if missing:
        return f"not named: {missing[0]}"
    for other in CASES:
        if not case.mistake and other.mistake and (
                case.style, case.resumes) == (other.style, other.resumes):
            if other.says[0] in out:
                return f"named though it is right: {other.says[0]}"
    return ""


SAME_SAMPLES = "FAIL  all 2 ranks read the same samples"
NOT_REDUCED = "FAIL  gradients are not reduced"
AROUND = "call model(...), not model.module(...)"
AS_ONE = "gradients agree with a single process"
WEIGHTS = "weights, relative to how far they have moved, agree"
MULTIPLIED = "an update has 16 samples, with one process 8"

SUITE = [  # one of each kind
    right("DDP", "an update has 32 samples, as with one process",
          "gradients are the mean of the ranks' own", AS_ONE, WEIGHTS,
          "dropout: it was switched off"),
    wrong("DDP", "all read the same", SAME_SAMPLES,
          ("loader = DataLoader(dataset, batch_size=32 // size, "
           "sampler=sampler)",
           "loader = DataLoader(dataset, batch_size=32 // size)")),
    wrong("DDP", "no set_epoch", "warn  a DistributedSampler shuffles, and "
          "set_epoch was not called", ("    sampler.set_epoch(epoch)\n", "")),
    wrong("DDP", "all write", "FAIL  several ranks write log.txt (line 28)",
          (STEP, STEP + "        open('log.txt', 'a').write('x')\n")),
    wrong("DDP", "reduced twice", "warn  gradients are reduced 2 times an "
          "update", (BACKWARD, "        (loss / 2).backward()\n        (nn."
                     "functional.mse_loss(model(x), y) / 2).backward()\n")),
    wrong("DDP", "a library writes", "warn  numpy writes x.npy on several "
          "ranks", ("g = torch.Gen", "import numpy; numpy.save('x', [1])\n"
                    "g = torch.Gen")),
    right("tables", "warn  4 parameters are smaller than with one process, or "
          "others: tables.0.weight", "losses agree with a single process"),
    right("parts by hand", "losses agree with a single process"),
    wrong("parts by hand", "a bias on each", "FAIL  in update 0 the mean loss "
          "is", ("x).relu())) + self.bias", "x).relu()) + self.bias)")),
    right("pipeline by hand", "1 of 2 ranks read samples"),
    wrong("pipeline by hand", "not tied", "FAIL  in update 0 the gradients of "
          "rank 1 are not rank 0's: Embedding.weight",
          ("    dist.all_reduce(embedding.weight.grad)\n", "")),
    right("unfrozen", AS_ONE),
    wrong("unfrozen", "not wrapped again", "FAIL  in update 2 gradients are "
          "not reduced", ("            model = DDP(model.module)\n", "")),
    right("skipped updates", "gradients are reduced once an update"),
    right("uneven", "an update has 24 samples, with one process 25"),
    right("two updates", "anything after update 1, with which the script "
          "ended"),
    wrong("DDP", "a collective on rank 0", "FAIL  as 2 processes ",
          (ZERO, ZERO
           + "        if rank == 0 and size > 1: dist.barrier()\n")),
    wrong("DDP", "the order of a set", "warn  what the model is given depends "
          "on Python's hashes", ("torch.randn(640, 10, generator=g)",
                                 "torch.randn(640, 10, generator=g)[:, "
                                 "list(map(int, set('0123456789')))]")),
    right("NumPy", "the ranks read different samples (16 each)",
          "other samples each time that it is started"),
    right("token mean", AS_ONE),
    right("token mean, more", "the loss is the mean over all targets of all "
          "ranks", AS_ONE),
    wrong("token mean, more", "its own number", "warn  each rank's loss is "
          "the mean over its own", ("        dist.all_reduce(count)\n", ""),
          ("size / count", "1 / count")),
    right("weighted mean", "warn  the gradients are a weighted mean of those "
          "of 2 minibatches, with weights from 0.4", AS_ONE),
    right("contrastive", "ranks gather something before backward()"),
    wrong("DDP", "stepped by their number", "the learning rate is 0.098, with "
          "one process 0.099, in update 1, as if its schedule were stepped 2 "
          "times an update: after as many samples it is the same",
          ("32 // size", "32"),
          (STEP, STEP + "        optimizer.param_groups[0]['lr'] -= "
           "size / 1000\n")),
    wrong("EMA", "on rank 0 alone", "warn  a copy of the model differs "
          "between the ranks: 0.bias", ("mine.lerp_(", "rank or mine.lerp_(")),
    right("files", AS_ONE),
    right("rank as a flag", AS_ONE),
    right("no seed", "warn  one process begins with other weights each time",
          "an update has 32 samples, as with one process"),
    wrong("few samples", "a constant epoch", "warn  set_epoch(0) is called in "
          "several epochs", ("set_epoch(epoch)", "set_epoch(0)")),
    wrong("split", "datasets that differ", "warn  rank 1 does not read its "
          "part of what one process reads, and rank 0 does",
          ("manual_seed(3)", "manual_seed(3 + rank)")),
    wrong("noise", "the same on all ranks", "warn  all ranks draw the same "
          "random numbers in each update: PyTorch's",
          ("torch.manual_seed(1 + rank)\n", "")),
    wrong("by hand", "summed", "FAIL  in update 0 the gradients are the sum "
          "over all ranks, not the mean",
          ("            weight.grad /= size\n", "")),
    wrong("by hand", "clipped first", "FAIL  gradients are clipped before "
          "they are reduced\n        -> reduce first: the norm is that of the "
          "mean\n  ok    weights are equal",
          (CLIP, ""), (BACKWARD, BACKWARD + CLIP)),
    right("taken", "gradients are the mean of the ranks' own, before",
          "0 wrong, 1 to look at"),
    right("by step", "gradients are reduced by the optimizer, in its step()",
          WEIGHTS),
    right("on GPUs alone", "without a GPU each process trains alone: a CPU "
          "stands in for GPUs", AS_ONE),
    right("local SGD", "warn  weights are averaged every 2 updates"),
    wrong("nanoGPT", "the same seed", "samples are read by several ranks in "
          "the same update",  # rank 0 alone evaluates, and then draws others
          ("manual_seed(1337 + seed_offset)", "manual_seed(1337)")),
    right("Lightning", MULTIPLIED, AS_ONE),
    right("FSDP2", WEIGHTS,
          "what each rank alone has computed of the gradients"),
    right("GPUs", "a CPU stands in for GPUs", AS_ONE, WEIGHTS),
    right("several alone", "warn  as one process rank 0 ended with an error: "
          "AssertionError", "an update has 32 samples", "gradients are the "
          "mean of the ranks' own", "it does not train as one"),
    right("FSDP2, meta", "warn  all ranks have the same numbers in their "
          "parts of 0.weight"),
    right("tensor parallel", AS_ONE, "warn  all ranks read the same samples",
          "whether gradients are reduced: with tensor parallelism"),
    right("sharded by hand", "warn  3 parameters are smaller than with one "
          "process, or others: up.weight, up.bias, down.weight",
          "warn  all ranks read the same samples"),
    right("images", "BatchNorm's running statistics differ between the ranks",
          "BatchNorm takes the mean over the samples of one process"),
    right("SyncBatchNorm", AS_ONE, "buffers are equal on all ranks"),
    wrong("two optimizers", "one of them on rank 0",
          "FAIL  rank 1 makes 4 updates",
          ("[one.step() for one in self.optimizers]",
           "[one.step() for one in self.optimizers[:2 - rank]]")),
    wrong("GAN", "a step without the wrapper", "FAIL  in update 1 the "
          "gradients of rank 1 are not rank 0's",
          ("fake = netG(", "fake = netG.module(")),
    wrong("workers", "workers read the same", "were read in an earlier update",
          ("if i % (size * 2) == rank * 2 + worker.id",
           "if i % size == (rank + worker.id) % size")),
    wrong("GradScaler", "clipped with the scale", "warn  gradients are "
          "clipped before scaler.unscale_",
          ("        scaler.unscale_(optimizer)\n", "")),
    right("starter", "the weights come back", "the optimizer's state comes "
          "back (exp_avg, exp_avg_sq, step)", "the learning rate goes on",
          "it goes on in the data where it was", "updates after it are those "
          "of the run that was not stopped", resumes=True),
    wrong("starter", "no optimizer", "FAIL  a resume after 2 updates: the "
          "optimizer's state does not come back: no step of layers.0.weight",
          ("if saved[\"optimizer\"][\"state\"]:", "if False:"), resumes=True),
]
CASES = [
    *SUITE,
    *(right(style, AS_ONE) for style in (
        "microbatches", "EMA", "torchrun's variables", "layers dropped",
        "mixed precision")),
    *(right(style, AS_ONE, "an update has 32 samples, as with one process")
      for style in ("few values", "split", "columns", "recurrent",
                    "derivatives", "functions", "GradScaler")),
    wrong("DDP", "minibatch multiplied", "warn  an update has 64 samples, "
          "with one process 32; the learning rate is the same",
          ("32 // size", "32")),
    wrong("DDP", "killed", "rank 1 was ended by SIGKILL (is the memory full?)",
          (BACKWARD, BACKWARD
           + "        import os; rank and os.kill(os.getpid(), 9)\n")),
    wrong("DDP", "around the wrapper", AROUND, ("model(x)",
                                                "model.module(x)")),
    right("DDP, a look", "an update has 32 samples, as with one"),
    wrong("DDP", "unused parameters", "find_unused_parameters=True",
          ("model = DDP(nn", "model = (nn"),
          ("optimizer = torch", "model.odd = nn.Parameter(torch.zeros(3))\n"
           "model = DDP(model)\noptimizer = torch")),
    wrong("DDP", "an error", "rank 0 ended with an error: ValueError: a bad "
          "sample (line 23)",
          (ZERO, "        raise ValueError('a bad sample')\n")),
    wrong("DDP", "not told its rank", "FAIL  no rank joins a process group: "
          "each trains alone\n        -> is it to be told its rank? "
          "--local_rank {rank} among its flags",
          ("dist.init_process_group(", "import sys\n"
           "if '--local_rank' in sys.argv: dist.init_process_group("),
          ("dist.get_rank(), dist.get_world_size()", "0, 1"),
          ("model = DDP(nn", "model = (nn"),
          ("(dataset)", "(dataset, 1, 0)")),
    wrong("DDP", "processes of its own", "without mp.spawn",
          ("dist.init_process_group(", "torch.multiprocessing.spawn(divmod, "
           "(0,))\ndist.init_process_group(")),
    wrong("microbatches", "their own number", "-> each microbatch's loss is "
          "the mean over its own 1 or 4 or 5 targets, and all count alike",
          ('reduction="sum")', ") / 2"), ("size / count * nn", "nn")),
    wrong("DDP", "a schedule by updates", "the learning rate is the same "
          "after as many updates, not after as many samples",
          ("32 // size", "32"), (STEP, STEP + "        optimizer."
                                 "param_groups[0]['lr'] *= 0.9\n")),
    right("clamped", AS_ONE, WEIGHTS),
    right("few samples", "right if the dataset is that small"),
    right("noise", "the model draws random numbers"),
    right("many updates", "rounding grows to that, too"),
    right("closure", "gradients are reduced once an update", AS_ONE),
    right("losses added", "losses agree with a single process", AS_ONE),
    right("no module", "weights are equal on all ranks",
          "nor whether each rank reads its own"),
    right("by hand", AS_ONE, "gradients are reduced once an update"),
    wrong("by hand", "not reduced", NOT_REDUCED,
          ("            dist.all_reduce(weight.grad)\n", "")),
    wrong("by hand", "broadcast", "FAIL  in update 0 all ranks have the "
          "gradients of rank 0 alone",
          ("dist.all_reduce(weight.grad)\n            weight.grad /= size",
           "dist.broadcast(weight.grad, 0)")),
    wrong("functions", "summed", "FAIL  in update 0 the gradients are 2 times "
          "those of one process", ("            weight.grad /= size\n", "")),
    right("in backward", "an update has 32 samples", AS_ONE, WEIGHTS),
    wrong("in backward", "not reduced", NOT_REDUCED,
          ("    dist.all_reduce(weight.grad)\n    weight.grad /= size\n", "")),
    right("nanoGPT", "the ranks read different samples",
          "gradients are the mean of the ranks' own"),
    right("minGPT", "an update has 32 samples, with one process 16", AS_ONE),
    right("Accelerate", "an update has 32 samples, with one process 16",
          AS_ONE),
    right("HF Trainer", MULTIPLIED, AS_ONE),
    wrong("Lightning", "each alone", NOT_REDUCED,
          ('devices=int(os.environ["WORLD_SIZE"]),\n        strategy="ddp",',
           'devices=1,'), (", plugins=[TorchElasticEnvironment()]", "")),
    wrong("GPUs", "no training", "of its own? a CPU stood in for GPUs",
          ("torch.cuda.set_device(local)\n", "raise SystemExit\n")),
    right("GPUs, sharded", "a CPU stands in for GPUs", AS_ONE, WEIGHTS),
    right("tensor parallel alone", "warn  all ranks read the same samples"),
    right("FSDP2, no seed", "one process begins with other weights"),
    wrong("FSDP2, meta", "not all initialised", "FAIL  the first weights are "
          "not finite numbers: 2.weight, 2.bias",
          ("(model[0], model[2]): layer.reset", "(model[0],): layer.reset")),
    wrong("FSDP2", "the optimizer before it", "FAIL  4 parameters got no "
          "gradient in any update", ("for layer in (", "optimizer = "
                                     "torch.optim.AdamW(model.parameters())\n"
                                     "for layer in ("),
          ("optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n",
           "")),
    right("HSDP", AS_ONE, "gradients are reduced once an update"),
    wrong("tensor parallel", "other samples", "warn  each rank reads other "
          "samples", ("(dataset, 1, 0,", "(dataset,")),
    right("FSDP1", "an update has 32 samples, as with one process",
          "FullyShardedDataParallel keeps them in its own way"),
    right("two optimizers", AS_ONE, WEIGHTS),
    right("GAN", "weights are equal on all ranks in all 8 updates"),
    right("workers", MULTIPLIED, "gradients are the mean of the ranks' own"),
    wrong("starter", "the data from its start", "FAIL  a resume after 2 "
          "updates: in the next update it reads the samples of update 0 "
          "again", ("load(train_data, steps,",
                    "load(train_data, range(args.max_steps),"), resumes=True),
    wrong("starter", "the schedule from its start", "FAIL  a resume after 2 "
          "updates: the learning rate is 0.00015, not 0.00045, in the next "
          "update, as at the start", ("lr = get_lr(step, args)",
                                      "lr = get_lr(step - first_step, args)"),
          resumes=True),
    wrong("starter", "random numbers", "warn  a resume after 2 updates: "
          "PyTorch's random numbers do not go on",
          ("        torch.manual_seed(hash((args.seed, step, rank)))  # for "
           "dropout\n", ""), ("nn.Dropout(0.0)", "nn.Dropout(0.1)"),
          resumes=True),
    right("HF Trainer", "it goes on in the data where it was",
          "the learning rate goes on", "updates after it are those",
          resumes=True),
    right("HF Trainer, no seed", "the weights come back", "two runs with the "
          "same flags differ", resumes=True),
    wrong("HF Trainer", "the model alone", "the optimizer's state does not "
          "come back", ("save_steps=2,",
                        "save_steps=2, save_only_model=True,"),
          resumes=True),
    right("minGPT", "the weights come back", "PyTorch's random numbers go on",
          resumes=True),
]
