"""tsm.transform + FSDP against one process that trains the unsplit model on the batches of all data-parallel ranks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.t5.modeling_t5 import T5Block

from parity_test import distance
from ranks import run_ranks

VOCABULARY, WIDTH, HEADS, SEQUENCE = 43, 32, 8, 7  # 43: the last parts of the vocabulary end with padding
STEPS, RATE, MAX_NORM = 12, 0.1, 0.7
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Model:
    build: Callable[..., nn.Module]
    unit: type[nn.Module]

    def __call__(self, seed: int = 0, **changes: Any) -> nn.Module:
        torch.manual_seed(seed)
        return self.build(**changes)


TOKENS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}


def llama(**changes: Any) -> nn.Module:
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": 4, "intermediate_size": 40, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, **TOKENS, **sizes | changes))


def mistral(**changes: Any) -> nn.Module:
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": 4, "intermediate_size": 40, "num_hidden_layers": 2}
    tied = {"tie_word_embeddings": True, "sliding_window": 4}
    return MistralForCausalLM(
        MistralConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, **TOKENS, **sizes | tied | changes)
    )


def gpt_neox(**changes: Any) -> nn.Module:
    sizes = {"num_attention_heads": HEADS, "intermediate_size": 40, "num_hidden_layers": 2}
    drop = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, max_position_embeddings=32, **TOKENS, **sizes | drop | changes
        )
    )


def gpt2(**changes: Any) -> nn.Module:
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=WIDTH, n_head=HEADS, n_layer=2, n_positions=32, **TOKENS, **drop | changes
        )
    )


def t5(**changes: Any) -> nn.Module:
    sizes = {"d_model": WIDTH, "d_kv": 4, "d_ff": 40, "num_layers": 2, "num_heads": HEADS, "dropout_rate": 0.0}
    kind = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    tokens = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **tokens, **sizes | kind | changes))


MODELS = {
    "llama": Model(llama, LlamaDecoderLayer),
    "mistral": Model(mistral, MistralDecoderLayer),
    "gpt_neox": Model(gpt_neox, GPTNeoXLayer),
    "gpt2": Model(gpt2, GPT2Block),
    "t5": Model(t5, T5Block),
}


def batch(step: int, part: int, rank: int) -> Tensor:
    random = torch.Generator().manual_seed(1000 * step + 100 * part + rank)
    return torch.randint(2, VOCABULARY, (2, SEQUENCE), generator=random)


def loss_of(name: str, model: nn.Module, tokens: Tensor) -> Tensor:
    if name == "t5":
        labels = tokens[:, :4].clone()
        labels[:, 3] = -100  # is not counted
        return model(input_ids=tokens, labels=labels).loss
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def logits_of(name: str, model: nn.Module, tokens: Tensor) -> Tensor:
    more = {"decoder_input_ids": tokens[:, :3]} if name == "t5" else {}
    return model(input_ids=tokens, use_cache=False, **more).logits


def parts_of(step: int) -> int:
    return 2 if step % 3 == 0 else 1  # with an accumulation of two


# ---- one process ----
@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]


def train_alone(name: str, data_ranks: int, steps: int = STEPS) -> Outcome:
    model = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses, norms = [], []
    for step in range(steps):
        for part in range(parts_of(step)):
            loss = loss_of(name, model, torch.cat([batch(step, part, rank) for rank in range(data_ranks)]))
            loss.backward()
            losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(losses, norms, {key: value.clone() for key, value in model.state_dict().items()})


# ---- ranks ----
def wrap(name: str, model: nn.Module, **arguments: Any) -> FullyShardedDataParallel:
    arguments = {"use_orig_params": True, **arguments}
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({MODELS[name].unit}), **arguments)


def train_split(name: str, data_rank: int, steps: int = STEPS, checkpointed: bool = False, **arguments: Any) -> Outcome:
    import tesserae as tsm

    model = tsm.transform(MODELS[name]())
    if checkpointed:
        model.gradient_checkpointing_enable()
    model = wrap(name, model.train(), **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses, norms = [], []
    for step in range(steps):
        parts = parts_of(step)
        for part in range(parts):
            with contextlib.nullcontext() if part == parts - 1 else model.no_sync():
                loss = loss_of(name, model, batch(step, part, data_rank))
                loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total, group=tsm.state.dp_process_group)
            losses.append(total.item() / tsm.state.dp_size)
        norms.append(model.clip_grad_norm_(MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return Outcome(losses, norms, model.state_dict())


def furthest(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def differences(ours: Outcome, theirs: Outcome) -> list[str]:
    found = []
    if not furthest(ours.losses, theirs.losses) <= TOLERANCE:
        found.append(f"losses {ours.losses}, not {theirs.losses}")
    if not furthest(ours.norms, theirs.norms) <= TOLERANCE:
        found.append(f"norms {ours.norms}, not {theirs.norms}")
    if list(ours.state) != list(theirs.state):
        return [*found, f"state dict has {list(ours.state)}, not {list(theirs.state)}"]
    for key, expected in theirs.state.items():
        if ours.state[key].shape != expected.shape:
            found.append(f"{key} is {list(ours.state[key].shape)}, not {list(expected.shape)}")
        elif not distance(ours.state[key], expected) <= TOLERANCE:
            found.append(f"{key} is {distance(ours.state[key], expected):.1e} away")
    return found


def forward_and_state(name: str) -> list[str]:
    """What differs before any training: logits, tokens, state dicts."""
    import tesserae as tsm

    whole = MODELS[name]().eval()
    split = tsm.transform(MODELS[name]()).eval()
    tokens, found = batch(0, 0, 0), []
    with torch.no_grad():
        if not distance(logits_of(name, split, tokens), logits_of(name, whole, tokens)) <= TOLERANCE:
            found.append("logits differ")
        if not furthest([loss_of(name, split, tokens).item()], [loss_of(name, whole, tokens).item()]) <= TOLERANCE:
            found.append("the loss of evaluation differs")
    generated = [m.generate(tokens, max_new_tokens=6, do_sample=False) for m in (split, whole)]
    if not torch.equal(*generated):
        found.append(f"generates {generated[0]}, not {generated[1]}")
    expected = whole.state_dict()
    mine = split.state_dict()
    if list(mine) != list(expected) or not all(torch.equal(mine[key], expected[key]) for key in expected):
        found.append("state_dict() is not that of the whole model")
    other = MODELS[name](seed=1).state_dict()
    split.load_state_dict(copy.deepcopy(other))
    again = split.state_dict()
    if not all(torch.equal(again[key], other[key]) for key in other):
        found.append("what load_state_dict() took, state_dict() does not give")
    return found


def parity(rank: int, world_size: int, tp: int, degree: int, names: list[str]) -> list[str]:
    data_ranks = world_size // tp
    expected = {name: train_alone(name, data_ranks) for name in names}
    import tesserae as tsm

    tsm.init({"tensor_parallel_degree": tp, "hybrid_shard_degree": degree})
    assert (tsm.state.tp_size, tsm.state.tp_rank) == (tp, rank % tp)
    assert (tsm.state.dp_size, tsm.state.dp_rank) == (data_ranks, rank // tp)
    assert dist.get_process_group_ranks(tsm.state.tp_process_group) == [rank - rank % tp + i for i in range(tp)]
    assert dist.get_process_group_ranks(tsm.state.dp_process_group) == list(range(rank % tp, world_size, tp))
    found = []
    for index, name in enumerate(names):
        print(name, flush=True)
        found += [f"{name}: {text}" for text in forward_and_state(name)]
        # All kinds of options, spread over the models.
        ours = train_split(name, rank // tp, checkpointed=index % 2 == 1, use_orig_params=index % 3 != 2)
        found += [f"{name}: {text}" for text in differences(ours, expected[name])]
    return found


@pytest.mark.parametrize(
    ("world_size", "tp", "degree", "names"),
    [
        (4, 2, 2, ["llama", "mistral", "gpt_neox", "gpt2", "t5"]),
        (4, 4, 1, ["llama", "mistral", "gpt_neox", "gpt2", "t5"]),
        (4, 2, 1, ["t5", "llama", "gpt2"]),
        (2, 2, 1, ["gpt_neox", "mistral"]),
    ],
    ids=["tp2x2", "tp4", "tp2xDDP", "two ranks"],
)
def test_parity(world_size: int, tp: int, degree: int, names: list[str]) -> None:
    """Forward, tokens, twelve clipped steps with accumulation, and state dicts are those of one process."""
    assert run_ranks(parity, world_size, tp, degree, names, deadline=240) == [[]] * world_size


# ---- random numbers ----
def dropout_of(name: str, seed: int, **changes: Any) -> list[str]:
    """Masks of split activations differ between the ranks, those of repeated ones do not, and what is recomputed has
    the same."""
    import tesserae as tsm

    torch.manual_seed(seed)
    model = tsm.transform(MODELS[name](**changes)).train()
    seen: list[Tensor] = []  # the generator's state where activations are the same on all ranks
    drawn: list[Tensor] = []  # and inside attention, where they are split
    for path, module in model.named_modules():
        if type(module).__name__.startswith("Row"):
            module.register_forward_hook(lambda *_: seen.append(torch.get_rng_state()))
        if type(module).__name__.startswith("Column") and "attn" in path:
            module.register_forward_hook(lambda *_: drawn.append(torch.get_rng_state()))
    tokens, found = batch(0, 0, 0), []
    torch.manual_seed(seed)
    first = loss_of(name, model, tokens)
    first.backward()
    gradients = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    group = tsm.state.tp_process_group
    for what, states, equal in (("repeated", seen, True), ("split", drawn, False)):
        everyone: list[Any] = [None] * tsm.state.tp_size
        dist.all_gather_object(everyone, torch.stack(states), group)
        same = [bool(torch.equal(a, b)) for a, b in zip(everyone[0], everyone[-1], strict=True)]
        if set(same) != {equal}:
            found.append(f"{name}: random numbers of {what} activations are the same on the ranks: {same}")
    model.zero_grad()
    model.gradient_checkpointing_enable()
    torch.manual_seed(seed)
    again = loss_of(name, model, tokens)
    again.backward()
    if again.item() != first.item():
        found.append(f"{name}: the loss is {again.item()} with checkpointing, not {first.item()}")
    for key, parameter in model.named_parameters():
        if not distance(parameter.grad, gradients[key]) <= TOLERANCE:
            found.append(f"{name}: the gradient of {key} differs with checkpointing")
    return found


# ---- from the meta device, from rank 0 ----
def delayed(rank: int, world_size: int) -> list[str]:
    import tesserae as tsm
    from tesserae.delayed_param import DelayedParamIniter

    schedule = [{"step": 2, "hybrid_shard_degree": 1}]
    tsm.init(
        {
            "tensor_parallel_degree": 2,
            "hybrid_shard_degree": 2,
            "random_seed": 5,
            "dial": {"schedule": schedule},
        }
    )
    found = []

    def whole_state(model: FullyShardedDataParallel, kind: StateDictType = StateDictType.FULL_STATE_DICT) -> Any:
        with FullyShardedDataParallel.state_dict_type(model, kind):
            return model.state_dict()

    def check(what: str, model: FullyShardedDataParallel, expected: dict[str, Tensor]) -> None:
        state = whole_state(model)
        wrong = [key for key in expected if not torch.equal(state[key], expected[key])]
        found.extend([f"{what}: {wrong}"] if wrong else [])

    # Any degree gives the numbers of one.
    for name in ("llama", "gpt_neox"):
        with torch.device("meta"):
            model, alone = MODELS[name](), MODELS[name]()
        states = []
        for part in (tsm.transform(model), alone):
            torch.manual_seed(3)
            init = DelayedParamIniter(part)
            with init.validate_params_and_buffers_inited():
                states.append(
                    wrap(
                        name,
                        part,
                        param_init_fn=init.get_param_init_fn(),
                        post_param_init_fn=init.get_post_param_init_fn(),
                    )
                )
        check(f"{name} from the meta device", states[0], whole_state(states[1]))

    # Only rank 0 has the weights.
    for name in ("mistral", "gpt2"):
        with torch.device("cpu" if rank == 0 else "meta"):
            model = MODELS[name]()
        model = tsm.transform(model, load_state_dict_from_rank0=True)
        init = DelayedParamIniter(model)
        sharded = wrap(name, model, param_init_fn=init.get_param_init_fn(), sync_module_states=True)
        check(f"{name} from rank 0", sharded, MODELS[name]().state_dict())
        # Whole tensors, and sharded ones, go in and come out.
        other = MODELS[name](seed=1).state_dict()
        sharded.load_state_dict(copy.deepcopy(other))
        check(f"{name}, loaded", sharded, other)
        with FullyShardedDataParallel.state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT):
            chunks = sharded.state_dict()
            sharded.load_state_dict(MODELS[name]().state_dict())
            sharded.load_state_dict(chunks)
        check(f"{name}, loaded from chunks", sharded, other)
        from torch.distributed.fsdp import FullStateDictConfig

        with FullyShardedDataParallel.state_dict_type(
            sharded, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        ):
            state = sharded.state_dict()
        if sorted(state) != (sorted(other) if rank == 0 else []):
            found.append(f"{name}: with rank0_only this rank has {list(state)}")
        elif not all(torch.equal(state[key], other[key]) for key in state):
            found.append(f"{name}: with rank0_only other values")

    # Masks.
    found += dropout_of("gpt2", 7, attn_pdrop=0.5, resid_pdrop=0.1, embd_pdrop=0.1)
    found += dropout_of("llama", 8, attention_dropout=0.5)
    return found + turning() + errors()


def turning() -> list[str]:
    """The dial turns in the middle of training, by schedule and by hand, at all tensor indices."""
    import tesserae as tsm

    model = wrap("llama", tsm.transform(MODELS["llama"]()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, degrees = [], []
    for step in range(6):
        loss = loss_of("llama", model, batch(0, 0, tsm.state.dp_rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        degrees.append(tsm.state.hybrid_shard_degree)
        if step == 3:
            tsm.reshard(model, optimizer, hybrid_shard_degree=2)
    if degrees != [2, 2, 1, 1, 2, 2]:
        return [f"degrees {degrees}"]
    plain = MODELS["llama"]()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    expected = []
    for _ in range(6):
        each = [loss_of("llama", plain, batch(0, 0, rank)) for rank in range(tsm.state.dp_size)]
        (sum(each) / len(each)).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(each[tsm.state.dp_rank].item())
    return [] if furthest(losses, expected) <= 1e-4 else [f"losses {losses} over changes of degree, not {expected}"]


def errors() -> list[str]:
    """What can not be, and what the error must say."""
    import tesserae as tsm

    def mlp(**sizes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, sizes.get("inner", 12)), nn.GELU(), nn.Linear(sizes.get("inner", 12), 8))

    world = dist.group.WORLD
    cases: list[tuple[Callable[[], Any], list[str]]] = [
        (lambda: tsm.transform(MODELS["llama"](num_key_value_heads=1)), ["heads", "1"]),
        (lambda: tsm.transform(mlp()), ["a Sequential over 2 ranks is not known", "plan="]),
        (lambda: tsm.transform(mlp(), plan={"*q_proj": "column"}), ["no module matches '*q_proj'", "'0', '2'"]),
        (lambda: tsm.transform(mlp(), plan={"0": "columns"}), ["'columns' of '0'", "column, row"]),
        (lambda: tsm.transform(mlp(inner=15), plan={"0": "column", "2": "row"}), ["15", "1, 3, 5, 15"]),
        (lambda: tsm.transform(mlp(), plan={"1": "row"}), ["1 is a GELU"]),
        (lambda: tsm.transform(mlp(), config={"moe": True}), ["expert parallelism"]),
        (lambda: tsm.transform(tsm.transform(MODELS["llama"]())), ["transform a model once"]),
        (
            lambda: FullyShardedDataParallel(tsm.transform(MODELS["llama"]()), process_group=world),
            ["tsm.state.dp_process_group", "[0, 1, 2, 3]"],
        ),
    ]
    found = []
    for index, (call, words) in enumerate(cases):
        try:
            call()
            found.append(f"case {index}: no error")
        except tsm.InvalidArgument as error:
            missing = [word for word in words if word not in str(error)]
            found += [f"case {index}: {missing} is not in {error}"] if missing else []
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    plain = mlp()
    split = tsm.transform(copy.deepcopy(plain), plan={"0": "column", "2": "row"})
    if not distance(split(x).detach(), plain(x).detach()) <= TOLERANCE:
        found.append("a plan gives another output")
    if split[0].weight.shape != (6, 8) or split[2].weight.shape != (8, 6):
        found.append(f"a plan gives parts {split[0].weight.shape} and {split[2].weight.shape}")
    return found


def test_beginnings_dropout_dial_and_errors() -> None:
    assert run_ranks(delayed, 4, deadline=240) == [[]] * 4


# ---- checkpoints ----
def trained(rank: int, world_size: int, tp: int, folder: str, load: bool) -> dict[str, Any]:
    """Two steps of AdamW, saved; or what was saved, loaded at this degree. The logical tensors, from every rank."""
    import tesserae as tsm

    if tp > 1:
        tsm.init({"tensor_parallel_degree": tp})
    found = {}
    for name in ("mistral", "gpt2"):
        model: Any = tsm.transform(MODELS[name](seed=2 if load else 0))
        model = wrap(name, model) if tp > 1 else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if load:
            assert tsm.checkpoint.load(f"{folder}/{name}", model, optimizer).step == 2
        else:
            for step in range(2):
                loss_of(name, model, batch(step, 0, 0)).backward()
                optimizer.step()
                optimizer.zero_grad()
            tsm.checkpoint.save(f"{folder}/{name}", model, optimizer, step=2)
        if tp == 1:
            named = dict(model.named_parameters())
            moments = {key: optimizer.state[p]["exp_avg"] for key, p in named.items()}
            found[name] = model.state_dict(), moments
            continue
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
            found[name] = model.state_dict(), {key: value["exp_avg"] for key, value in state.items()}
            again = FullyShardedDataParallel.optim_state_dict_to_load(
                model, optimizer, FullyShardedDataParallel.optim_state_dict(model, optimizer)
            )
        before = [t.clone() for values in optimizer.state.values() for t in values.values()]
        optimizer.load_state_dict(again)
        after = [t for values in optimizer.state.values() for t in values.values()]
        assert all(map(torch.equal, before, after)) and len(before) == len(after)
    return found


def test_checkpoints_load_at_any_degree(tmp_path: Path) -> None:
    """Bitwise: weights and moments."""
    saved = run_ranks(trained, 4, 2, str(tmp_path), False, deadline=240)
    loaded = run_ranks(trained, 4, 4, str(tmp_path), True, deadline=240)
    alone = trained(0, 1, 1, str(tmp_path), True)
    for everyone in (*saved[1:], *loaded, alone):
        for name, tensors in saved[0].items():
            for ours, theirs in zip(everyone[name], tensors, strict=True):
                assert set(ours) == set(theirs)
                assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []


def impossible_degrees(rank: int, world_size: int) -> list[str]:
    import tesserae as tsm

    texts = []
    for config in ({"tensor_parallel_degree": 3}, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 4}):
        with pytest.raises(tsm.InvalidArgument) as raised:
            tsm.init(config)
        texts.append(str(raised.value))
        assert not tsm.is_initialized()
    return texts


def test_impossible_degrees() -> None:
    """The text names what would be possible."""
    for tensor, data in run_ranks(impossible_degrees, 4):
        assert "3" in tensor and "2 or 4" in tensor.replace(" and ", " or "), tensor
        assert "4" in data and "2" in data, data
