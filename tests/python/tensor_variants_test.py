"""Layers of the user's that are made of other options, or stand in a model of the user's own: forward, loss, gradients
and state dicts at T = 2 against the unsplit model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint

import expert_models
from closeness import distance
from ranks import run_ranks
from tensor_models import MODELS, SEQUENCE, VOCABULARY, WIDTH, batch, loss_of

TOLERANCE = 1e-5
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("t5", {"tie_word_embeddings": True, "feed_forward_proj": "relu"}),
    ("gpt2", {"add_cross_attention": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("gpt_neox", {"attention_bias": False, "rotary_pct": 1.0}),
]


def randomised(model: nn.Module) -> nn.Module:
    """Biases begin at zero and norms at one, where an error of theirs is not seen."""
    random = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=random))
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole, of all parameters of a model that FSDP does not have; collective."""
    found = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            assert parameter.grad is not None, f"{path}.{name}"
            split = getattr(module, "_tesserae_splits", {}).get(name)
            found[f"{path}.{name}"] = module._whole_of(parameter.grad, split) if split else parameter.grad.clone()
    return found


def different(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = TOLERANCE) -> list[str]:
    if list(ours) != list(theirs):
        return [f"{list(ours)} are not {list(theirs)}"]
    # The gradient of a bias of keys is zero but for rounding: no token's weights depend on it.
    largest = max(value.abs().max().item() for value in theirs.values())
    return [
        f"{key}: {ours[key].shape} not {value.shape}" if ours[key].shape != value.shape else f"{key} differs"
        for key, value in theirs.items()
        if ours[key].shape != value.shape
        or not (distance(ours[key], value) <= tolerance or (ours[key] - value).abs().max() <= 1e-6 * largest)
    ]


def same_state(split: nn.Module, whole: nn.Module, other: nn.Module) -> list[str]:
    """What state_dict() gives, to the bit, and what it gives after load_state_dict()."""
    found = []
    for what, expected in (("state_dict()", whole.state_dict()), ("what was loaded", other.state_dict())):
        if what != "state_dict()":
            split.load_state_dict(copy.deepcopy(expected))
        state = split.state_dict()
        if list(state) != list(expected) or not all(torch.equal(state[key], expected[key]) for key in expected):
            found.append(f"{what} is not that of the whole model")
    return found


# ---- options of known families ----
def compared(name: str, changes: dict[str, Any], sequence: bool) -> list[str]:
    import tesserae as tsm

    def forward(model: nn.Module) -> tuple[Tensor, Tensor | None]:
        """The loss, and what the model reads from another one, whose gradient counts, too."""
        if "add_cross_attention" not in changes:
            return loss_of(name, model, tokens), None
        random = torch.Generator().manual_seed(12)
        read = torch.randn(2, 5, WIDTH, generator=random).requires_grad_()
        return model(input_ids=tokens, labels=tokens, encoder_hidden_states=read, use_cache=False).loss, read

    tokens, found = batch(0, 0, 0), []
    whole = randomised(MODELS[name](**changes)).train()
    split = tsm.transform(randomised(MODELS[name](**changes)), sequence_parallel=sequence).train()
    (loss, read), (expected, expected_read) = forward(split), forward(whole)
    loss.backward()
    expected.backward()
    values, targets = {"loss": loss.detach()}, {"loss": expected.detach()}
    if read is not None and expected_read is not None:
        values["read"], targets["read"] = read.grad, expected_read.grad  # type: ignore[assignment]
    found += different(values | gradients(split), targets | gradients(whole))
    more: dict[str, Any] = {"decoder_input_ids": tokens[:, :3]} if name == "t5" else {}
    if "add_cross_attention" in changes:
        more["encoder_hidden_states"] = torch.ones(2, 3, WIDTH)
    with torch.no_grad():
        logits, wanted = (m.eval()(input_ids=tokens, use_cache=False, **more).logits for m in (split, whole))
    found += different({"logits": logits}, {"logits": wanted})
    found += same_state(split, whole, MODELS[name](seed=1, **changes))
    return [f"{name} {changes}{', sequence-parallel' if sequence else ''}: {text}" for text in found]


def as_tuples() -> list[str]:
    """A mixture's has logits in the third place: none of a part of the vocabulary, and everything else."""
    import tesserae as tsm

    tokens = batch(0, 0, 0)
    asked = {"labels": tokens, "output_router_logits": True, "return_dict": False, "use_cache": False}
    whole, split = expert_models.MODELS["mixtral"](), tsm.transform(expert_models.MODELS["mixtral"]())
    loss, auxiliary, _, routed = whole(input_ids=tokens, **asked)
    ours = split(input_ids=tokens, **asked)
    if len(ours) != 3 or len(ours[2]) != len(routed):
        return [f"a mixture's tuple is of {[type(value).__name__ for value in ours]}"]
    targets = {"loss": loss, "auxiliary loss": auxiliary} | {f"router {i}": each for i, each in enumerate(routed)}
    return different(dict(zip(targets, (*ours[:2], *ours[2]))), targets)


def with_a_checkpointed_head(implementation: CheckpointImpl) -> list[str]:
    """It is computed again when forward has ended; or with all of the model, in a forward of its own."""
    import tesserae as tsm

    def checkpointed(layer: nn.Module) -> nn.Module:
        return checkpoint_wrapper(layer, checkpoint_impl=implementation)

    tokens = batch(0, 0, 0)
    whole, split = MODELS["llama"](), tsm.transform(MODELS["llama"]())
    for model in (whole, split):
        apply_activation_checkpointing(model, checkpointed, lambda layer: isinstance(layer, nn.Linear))
        loss_of("llama", model, tokens).backward()
        checkpoint(lambda each: loss_of("llama", each, tokens), model, use_reentrant=False).backward()
    found = different(gradients(split), gradients(whole))
    if split.get_output_embeddings()(torch.zeros(1, WIDTH)).shape != (1, VOCABULARY):
        found.append("logits of the head by itself are of a part of the vocabulary")
    return [f"a head with {implementation}: {text}" for text in found]


# ---- a plan for a model of the user's own ----
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.share_dropped = HEADS, 0.0
        self.wq, self.wkv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.wo = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, (k, v) = self.wq(x), self.wkv(x).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        self.kept = nn.functional.dropout(y, self.share_dropped, self.training)
        return x + self.wo(self.kept)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([nn.ModuleDict({"attention": Attention()}) for _ in range(2)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block["attention"](x)
        return x


class Own(nn.Module):
    def __init__(self, tied: bool, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.head = Body(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.body.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens))


HEADS = 4
PLAN = {  # of docs/python.md
    "*.wq": "column",
    "*.wkv": "column:2",
    "*.wo": "row",
    "*.attention": "divide:num_heads",
    "*.embed": "vocabulary",
    "head": "head",
}


def planned(tied: bool) -> list[str]:
    import tesserae as tsm

    whole, split = Own(tied), tsm.transform(Own(tied), plan=PLAN)
    tokens, found = batch(0, 0, 0), []
    attention = split.body.blocks[0]["attention"]
    shapes = [tuple(layer.weight.shape) for layer in (attention.wq, attention.wkv, attention.wo, split.head)]
    rows = -(-VOCABULARY // 2)
    if shapes != [(WIDTH // 2, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH // 2), (rows, WIDTH)]:
        found.append(f"parts {shapes}")
    if attention.num_heads != HEADS // 2:
        found.append(f"{attention.num_heads} heads")
    if (split.head.weight is split.body.embed.weight) != tied:
        found.append("the head is not tied as before")
    logits, expected = split(tokens), whole(tokens)
    if logits.shape != (2, SEQUENCE, VOCABULARY):
        found.append(f"logits {logits.shape}")
    for each in (logits, expected):
        nn.functional.cross_entropy(each.flatten(0, 1), tokens.flatten()).backward()
    found += different({"logits": logits.detach()}, {"logits": expected.detach()})
    found += different(gradients(split), gradients(whole))
    found += same_state(split, whole, Own(tied, seed=4))
    return [f"a model with a plan{', tied' if tied else ''}: {text}" for text in found]


# ---- where and as what ----
def drops_apart() -> list[str]:
    """Whatever the rate of a function is called: each rank has other heads."""
    import tesserae as tsm

    model = Own(tied=False)
    for block in model.body.blocks:
        block["attention"].share_dropped = 0.5
    split = tsm.transform(model, plan=PLAN).train()
    split(batch(0, 0, 0))
    masks = [block["attention"].kept == 0 for block in split.body.blocks]
    everyone: list[Any] = [None] * tsm.state.tp_size
    dist.all_gather_object(everyone, masks, tsm.state.tp_process_group)
    same = [torch.equal(a, b) for a, b in zip(*everyone, strict=True)]
    return [f"ranks drop the same of their heads: {same}"] if any(same) else []


def placed() -> list[str]:
    """device= and dtype= of tsm.transform."""
    import tesserae as tsm

    found, tokens = [], batch(0, 0, 0)
    whole = MODELS["mistral"]().double().eval()
    split = tsm.transform(MODELS["mistral"](), device=torch.device("cpu"), dtype=torch.float64).eval()
    if {p.dtype for p in split.parameters()} != {torch.float64}:
        found.append("parameters are not of the dtype that was given")
    with torch.no_grad():
        logits, expected = split(input_ids=tokens).logits, whole(input_ids=tokens).logits
    found += different({"logits": logits}, {"logits": expected}, 1e-12)
    if {t.dtype for t in split.state_dict().values()} != {torch.float64}:
        found.append("the state dict is of another dtype")
    small = tsm.transform(MODELS["gpt2"](), dtype=torch.bfloat16)
    if {(p.dtype, p.device.type) for p in small.parameters()} != {(torch.bfloat16, "cpu")}:
        found.append("only a dtype was given, and parameters have another one or have moved")
    if loss_of("gpt2", small, tokens).dtype != torch.float32:
        found.append("the loss of a bf16 model is not computed in fp32")
    moved = tsm.transform(MODELS["gpt2"](), device=torch.device("meta"))
    if not all(p.is_meta and p.dtype == torch.float32 for p in moved.parameters()):
        found.append("the model was not moved to the device")
    with torch.device("meta"):
        model = MODELS["llama"]()
    empty = tsm.transform(model, device=torch.device("cpu"), dtype=torch.bfloat16)
    if not all(p.is_meta and p.dtype == torch.bfloat16 for p in empty.parameters()):
        found.append("a model of the meta device got memory without values, or another dtype")
    if empty.model.layers[0].self_attn.q_proj.weight.shape != (WIDTH // 2, WIDTH):
        found.append("a model of the meta device was not cut")
    return [f"device and dtype: {text}" for text in found]


# ---- what would train something else, unseen ----
def refused(what: str, error: type[Exception], match: str, call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except error as raised:
        return [] if match in str(raised) else [f"{what}: {raised}"]
    return [f"{what}: no error"]


def given_by_rank(rank: int) -> list[str]:
    """Other batches, other seeds, a copy, and tokens that only padding has a row for."""
    import tesserae as tsm

    tokens, others = batch(0, 0, 0), batch(0, 0, rank)
    unequal = tsm.transform(MODELS["llama"]())
    with torch.no_grad():
        loss_of("llama", unequal, others)  # an evaluation may be of one rank's own choice
    found = refused(
        "other tokens",
        tsm.InvalidArgument,
        "0 and 1 were given different batches",
        lambda: loss_of("llama", unequal, others),
    )
    found += refused(
        "other labels",
        tsm.InvalidArgument,
        "different batches",
        lambda: tsm.transform(MODELS["llama"]())(input_ids=tokens, labels=others),
    )
    drops = tsm.transform(MODELS["gpt2"](resid_pdrop=0.1)).train()
    torch.manual_seed(rank)
    found += refused(
        "other seeds", tsm.InvalidArgument, "draw different random numbers", lambda: loss_of("gpt2", drops, tokens)
    )
    jitters = tsm.transform(MODELS["llama"]()).train()
    jitters.model.layers[0].mlp.jitter_noise = 0.01
    torch.manual_seed(rank)
    found += refused(
        "other seeds of jitter",
        tsm.InvalidArgument,
        "different random numbers",
        lambda: loss_of("llama", jitters, tokens),
    )
    torch.manual_seed(rank)
    loss_of("gpt2", tsm.transform(MODELS["gpt2"](resid_pdrop=0.1)).eval(), tokens)
    found += refused("a copy", tsm.InvalidArgument, "load this one's state dict", lambda: copy.deepcopy(unequal))
    beyond = tokens.clone()
    beyond[0, 0] = VOCABULARY
    found += refused(
        "a token of padding", IndexError, "out of range", lambda: tsm.transform(MODELS["llama"]())(input_ids=beyond)
    )
    return found


def begun_otherwise(rank: int) -> list[str]:
    """A norm, which is not split, with other values: what FSDP's sync_module_states does not mend."""
    import tesserae as tsm

    model = tsm.transform(MODELS["llama"]())
    with torch.no_grad():
        model.model.norm.weight.add_(rank)
    wrapped = FullyShardedDataParallel(model, sync_module_states=True, use_orig_params=True)
    named = '"model.norm.weight" is not split among the 2 tensor-parallel ranks'
    return refused("other values", tsm.Mismatch, named, lambda: loss_of("llama", wrapped, batch(0, 0, 0)))


def without_a_row_of_padding() -> list[str]:
    """padding_idx of an embedding that is cut by features."""
    import tesserae as tsm

    def build() -> nn.Sequential:
        torch.manual_seed(5)
        return nn.Sequential(nn.Embedding(6, 4, padding_idx=0), nn.Linear(4, 4))

    whole, split = build(), tsm.transform(build(), plan={"0": "features", "1": "row"})
    tokens = torch.tensor([[0, 1, 2, 0, 5]])
    for model in (whole, split):
        model(tokens).square().sum().backward()
    return [f"padding_idx: {text}" for text in different(gradients(split), gradients(whole))]


def all_of_them(rank: int, world_size: int) -> list[str]:
    import tesserae as tsm

    tsm.init({"tensor_parallel_degree": 2})
    found = []
    for sequence in (False, True):
        for name, changes in VARIANTS:
            found += compared(name, changes, sequence)
    found += as_tuples() + [text for each in CheckpointImpl for text in with_a_checkpointed_head(each)]
    found += planned(tied=False) + planned(tied=True) + drops_apart() + placed()
    return found + given_by_rank(rank) + begun_otherwise(rank) + without_a_row_of_padding()


def test_variants_plans_devices_and_dtypes() -> None:
    assert run_ranks(all_of_them, 2) == [[]] * 2
