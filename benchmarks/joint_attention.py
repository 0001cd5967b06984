"""The engine against its peers, in one run: `python benchmarks/joint_attention.py [PART ...]` (all parts by default).

op        forward and backward of the operator, against PyTorch's attention over concatenated keys and a mask
short     two kernel calls against one over concatenated keys and a dense mask, by length
packed    documents packed into blocks, against PyTorch's attention over concatenated keys and a mask
memory    what a forward of 16,384 positions allocates
training  a training step, against Llama and HRM-Text of the same visits and width
decoding  tokens after a context of 1,024, against the same Llama with its default cache
prompt    time to the first token after 4,096, and the cache, against the matched Full Loop
growth    how the operator's time grows with length, a training step's with loops and batch
"""

import argparse
import itertools
import resource
from functools import partial
from multiprocessing import get_context
from statistics import median

import torch
import torch.nn.functional as F
from paired import paired, report, speedup
from transformers import HrmTextConfig, HrmTextForCausalLM, LlamaConfig, LlamaForCausalLM

from asymloop_hf import AsymLoopConfig, AsymLoopForCausalLM, FullLoopForCausalLM
from asymloop_hf.modeling.joint_attention import _joint_attention, joint_attention
from asymloop_hf.modeling.joint_mask import NO_MASK, JointMask

HIDDEN, INTERMEDIATE, HEADS, VOCABULARY = 512, 1376, 8, 4096
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 8192,
}


def asymloop(layers=2, loops=3, **options) -> AsymLoopForCausalLM:
    """`layers` in each stack: `layers * (1 + loops)` visits."""
    stacks = {"num_encoder_layers": layers, "num_decoder_layers": layers, "num_loops": loops}
    return AsymLoopForCausalLM(AsymLoopConfig(**SHAPE, **stacks, **options))


def qkv(length: int, dtype=torch.float32, batch=2, heads=8, head_dim=64) -> list[torch.Tensor]:
    """Queries and the key/values of two sources, laid out as projections are."""
    return [torch.randn(batch, length, heads, head_dim, dtype=dtype).transpose(1, 2) for _ in range(5)]


def concatenated(query, global_keys, global_values, local_keys, local_values, mask):
    keys, values = torch.cat([global_keys, local_keys], 2), torch.cat([global_values, local_values], 2)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)


def with_backward(attend, tensors, grad):
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    return lambda: torch.autograd.grad(attend(*tensors), tensors, grad)


def op(repeats: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for length in (256, 512, 1024, 2048):
            tensors = qkv(length, dtype)
            causal = torch.ones(length, length, dtype=torch.bool).tril()
            mask = torch.cat([causal, causal], -1)
            attends = {
                "joint": lambda *x: joint_attention(*x)[0],
                "concatenated": lambda *x, mask=mask: concatenated(*x, mask),
            }
            grad = torch.randn_like(tensors[0])
            steps = {name: with_backward(attend, tensors, grad) for name, attend in attends.items()}
            name = f"{str(dtype).removeprefix('torch.')}, T={length}"
            report(f"op forward and backward, {name}", paired(steps, repeats), of="joint")
            with torch.no_grad():
                forwards = {name: partial(attend, *tensors) for name, attend in attends.items()}
                report(f"op forward, {name}", paired(forwards, repeats), of="joint")


def short(repeats: int) -> None:
    shapes = itertools.product((torch.float32, torch.bfloat16), ((8, 64), (4, 32)))
    for dtype, (heads, head_dim) in shapes:
        for length in (32, 64, 128, 256):
            tensors = qkv(length, dtype, heads=heads, head_dim=head_dim)
            grad = torch.randn_like(tensors[0])
            calls = {
                name: lambda *x, concatenated=concatenated: _joint_attention(*x, *NO_MASK, concatenated, 0.125)[0]
                for name, concatenated in (("two calls", False), ("one call", True))
            }
            steps = {name: with_backward(attend, tensors, grad) for name, attend in calls.items()}
            shape = f"{heads} heads of {head_dim}, T={length}"
            title = f"short, forward and backward, {str(dtype).removeprefix('torch.')}, {shape}"
            report(title, paired(steps, repeats), of="two calls")


def packed(repeats: int) -> None:
    tensors = qkv(1024, batch=8)
    causal = torch.ones(1024, 1024, dtype=torch.bool).tril()
    for document_length in (16, 64, 256):
        documents = (torch.rand(8, 1024) < 1 / document_length).cumsum(1)
        seen = causal & (documents[:, None, :, None] == documents[:, None, None, :])
        mask = torch.cat([seen, seen], -1)
        attends = {
            "joint": lambda *x, mask: joint_attention(*x, JointMask(documents=mask))[0],
            "concatenated": concatenated,
        }
        masks = {"joint": documents, "concatenated": mask}
        grad = torch.randn_like(tensors[0])
        steps = {
            name: with_backward(partial(attend, mask=masks[name]), tensors, grad) for name, attend in attends.items()
        }
        title = f"packed, forward and backward, documents of {document_length} tokens"
        report(title, paired(steps, repeats), of="joint")


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory(repeats: int) -> None:
    """In a new process, whose peak no other part has raised before."""
    process = get_context("spawn").Process(target=print_memory)
    process.start()
    process.join()


@torch.no_grad()
def print_memory() -> None:
    tensors = qkv(16384, batch=1)
    joint_attention(*(tensor[:, :, :128] for tensor in tensors))
    size = sum(tensor.nbytes for tensor in tensors[:3])
    before = peak_bytes()
    joint_attention(*tensors)
    print(f"memory, T=16384: {(peak_bytes() - before) / size:.2f} times q+k+v ({size / 2**20:.0f} MiB)", flush=True)


def training_step(model, batch: int, length: int):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    input_ids = torch.randint(0, VOCABULARY, (batch, length))

    def step():
        model(input_ids=input_ids, labels=input_ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def hrm_text(routed: list[int] | None) -> HrmTextForCausalLM:
    """Two layers in each stack, eight visits in all; `routed` low cycles get a gradient (its own default: 2)."""
    cycles = {"num_hidden_layers": 2, "H_cycles": 1, "L_cycles": 3, "L_bp_cycles": routed}
    return HrmTextForCausalLM(HrmTextConfig(**SHAPE, **cycles, head_dim=HIDDEN // HEADS, prefix_lm=False))


def training(repeats: int) -> None:
    models = {
        "asymloop": asymloop(),
        "asymloop, window 16": asymloop(local_window=16),
        "llama": LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=8)),
        "hrm_text, gradient through every visit": hrm_text([3]),
        "hrm_text, gradient through 6 of 8 visits": hrm_text([2]),
    }
    steps = {name: training_step(model, batch=2, length=1024) for name, model in models.items()}
    seconds = paired(steps, repeats)
    for name in ("asymloop", "asymloop, window 16"):
        peers = {peer: times for peer, times in seconds.items() if peer == name or not peer.startswith("asymloop")}
        report(f"training step, T=1024, {name}", peers, of=name)


@torch.no_grad()
def decode(model, cache, batch: int, new_tokens: int) -> None:
    for _ in range(new_tokens):
        model(torch.full((batch, 1), 7), past_key_values=cache, use_cache=True)


@torch.no_grad()
def decoding(repeats: int) -> None:
    models = {"asymloop": asymloop(), "llama": LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=8))}
    for batch in (1, 8):
        decoders = {}
        for name, model in models.items():
            input_ids = torch.randint(0, VOCABULARY, (batch, 1024))
            cache = model.eval()(input_ids, use_cache=True, logits_to_keep=1).past_key_values
            decoders[name] = partial(decode, model, cache, batch, new_tokens=8)
        report(f"decoding, context 1024, batch {batch}", paired(decoders, repeats), of="asymloop")


def cache_bytes(cache) -> int:
    """What the cache keeps in memory, with the room that it holds for more."""
    storages = [
        t.untyped_storage() for layer in cache.layers if layer.is_initialized for t in (layer.keys, layer.values)
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@torch.no_grad()
def prompt(repeats: int) -> None:
    windowed = asymloop(layers=4, loops=5, local_window=16).eval()
    full_loop = FullLoopForCausalLM(windowed.config.matched_full_loop()).eval()
    input_ids = torch.randint(0, VOCABULARY, (1, 4096))
    models = {"asymloop": windowed, "full loop": full_loop}
    reads = {
        name: lambda model=model: model(input_ids, use_cache=True, logits_to_keep=1) for name, model in models.items()
    }
    report("first token, prompt 4096, window 16", paired(reads, repeats), of="asymloop")
    sizes = {name: cache_bytes(read().past_key_values) for name, read in reads.items()}
    ratio = sizes["full loop"] / sizes["asymloop"]
    print(
        f"cache after 4096: {ratio:.2f}x smaller ({', '.join(f'{n} {s / 2**20:.0f} MiB' for n, s in sizes.items())})"
    )


def growth(repeats: int) -> None:
    with torch.no_grad():
        for length in (256, 512, 1024, 2048, 4096, 8192, 16384):
            tensors = qkv(length, batch=1)
            kinds = {
                "joint": lambda tensors=tensors: joint_attention(*tensors),
                "one causal source": lambda x=tensors: F.scaled_dot_product_attention(*x[:3], is_causal=True),
                "window 16": lambda tensors=tensors: joint_attention(*tensors, JointMask(window=16)),
            }
            seconds = paired(kinds, repeats)
            times = ", ".join(f"{name} {1e3 * median(values):.1f} ms" for name, values in seconds.items())
            print(f"growth, forward, batch 1, T={length}: {times}", flush=True)
    steps = {f"R={loops}": training_step(asymloop(loops=loops), 2, 256) for loops in (1, 2, 3, 5, 8)}
    steps |= {f"R=3, batch {batch}": training_step(asymloop(), batch, 256) for batch in (1, 4, 8)}
    seconds = paired(steps, repeats)
    for name in steps:
        print(f"growth, training step, T=256, {name}: {1 / speedup(seconds, name, 'R=1'):.2f} times R=1", flush=True)


PARTS = {part.__name__: part for part in (op, short, packed, memory, training, decoding, prompt, growth)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}: it must be one of {', '.join(PARTS)}")
    if arguments.repeats < 1:
        parser.error(f"repeats={arguments.repeats} is not allowed: it must be at least 1")
    torch.manual_seed(0)
    for part in arguments.parts or PARTS:
        PARTS[part](arguments.repeats)


if __name__ == "__main__":
    main()
