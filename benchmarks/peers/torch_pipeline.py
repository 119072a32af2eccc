"""The model of `benchmarks.training` under torch.distributed.pipelining: two processes over gloo.

Each has one core and one thread. Written as its users write: `nn.Module`s, scaled_dot_product_attention,
`PipelineStage`, a schedule, AdamW. Parameters and batch are those of the other systems, from a file of NumPy arrays
whose names are paths in the model's tree.
"""

from __future__ import annotations

from typing import Any

from benchmarks.peers.trainers import serve

JOIN_LIMIT_S = 60


class Torch:
    """The process of one pipeline stage."""

    def __init__(self, rank: int, ranks: int, address: str, sizes: dict[str, Any], parameters: str) -> None:
        import datetime

        import numpy as np
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{address}",
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=JOIN_LIMIT_S),
        )
        self.rank, self.ranks, self.sizes = rank, ranks, sizes
        with np.load(parameters) as file:
            self.arrays = {name: torch.from_numpy(file[name]) for name in file.files}
        self.runs: dict[tuple[str, int], tuple[Any, Any]] = {}

    def prepare(self, case: str, microbatches: int, steps: int) -> list[float]:
        """Builds the stage and its optimizer again. `case` is "1f1b" or "gpipe"."""
        import torch
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        sizes = self.sizes
        module = stage_of(self.arrays, sizes, self.rank, self.ranks)
        stage = PipelineStage(module, self.rank, self.ranks, torch.device("cpu"))
        kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[case]
        schedule = kind(stage, microbatches, loss_fn=token_loss)
        # The defaults of torch are not those of optax, so all are given.
        decay = [p for p in module.parameters() if getattr(p, "decays", False)]
        rest = [p for p in module.parameters() if not getattr(p, "decays", False)]
        optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": sizes["weight_decay"]}, {"params": rest, "weight_decay": 0.0}],
            lr=sizes["learning_rate"],
            betas=(0.9, 0.999),
            eps=1e-8,
        )
        self.runs[case, microbatches] = schedule, optimizer
        return [loss for _ in range(steps) for loss in self._step(case, microbatches)]

    def train(self, case: str, microbatches: int, steps: int) -> None:
        """As `trainers.Trainer`."""
        for _ in range(steps):
            self._step(case, microbatches)

    def _step(self, case: str, microbatches: int) -> list[float]:
        schedule, optimizer = self.runs[case, microbatches]
        batch = self.arrays["batch"][: microbatches * self.sizes["examples"]].long()
        optimizer.zero_grad(set_to_none=True)
        losses: list[Any] = []
        if self.rank == 0:
            schedule.step(batch[:, :-1])
        elif self.rank == self.ranks - 1:
            schedule.step(target=batch[:, 1:], losses=losses, return_outputs=False)
        else:
            schedule.step()
        optimizer.step()
        return [float(sum(loss.detach() for loss in losses)) / microbatches] if losses else []


def token_loss(logits: Any, targets: Any) -> Any:
    """The mean over a microbatch; the schedule takes the mean over all of them."""
    import torch

    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def stage_of(arrays: dict[str, Any], sizes: dict[str, Any], rank: int, ranks: int) -> Any:
    """The layers of one stage as a module, filled with a copy of the given arrays."""
    from torch import nn

    make = Make(arrays, sizes["hidden"])
    each = sizes["layers"] // ranks

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            numbers = range(rank * each, (rank + 1) * each)
            self.layers = nn.ModuleList(layer_of(make, sizes["heads"], number) for number in numbers)
            self.tokens: Any = None
            self.head: Any = None
            if rank == 0:
                self.tokens = nn.Embedding.from_pretrained(arrays["embedding/tokens"].clone(), freeze=False)
                self.positions = make.decaying(arrays["embedding/positions"])
                self.tokens.weight.decays = True
            if rank == ranks - 1:
                self.final = make.norm("final")
                self.head = nn.Linear(sizes["hidden"], sizes["vocabulary"], bias=False)
                self.head.weight = make.decaying(arrays["head/tokens"])

        def forward(self, x: Any) -> Any:
            if self.tokens is not None:
                x = self.tokens(x) + self.positions
            for layer in self.layers:
                x = layer(x)
            return x if self.head is None else self.head(self.final(x))

    return Stage()


class Make:
    """Modules filled with copies of arrays; weights that decay are marked."""

    def __init__(self, arrays: dict[str, Any], hidden: int) -> None:
        self.arrays, self.hidden = arrays, hidden

    def decaying(self, array: Any) -> Any:
        from torch import nn

        made = nn.Parameter(array.contiguous().clone())
        made.decays = True
        return made

    def linear(self, weight: Any, bias: Any) -> Any:
        """A linear layer with the weights of a matrix [in, out]."""
        from torch import nn

        made = nn.Linear(*weight.shape)
        made.weight, made.bias = self.decaying(weight.T), nn.Parameter(bias.clone())
        return made

    def norm(self, path: str, *layer: int) -> Any:
        from torch import nn

        made = nn.LayerNorm(self.hidden, eps=1e-5)
        made.weight, made.bias = (nn.Parameter(self.arrays[f"{path}/{p}"][layer].clone()) for p in ("scale", "bias"))
        return made


def layer_of(make: Make, heads: int, number: int) -> Any:
    """One layer; queries, keys and values come out of one matrix."""
    import torch
    from torch import nn
    from torch.nn import functional

    def of(path: str) -> Any:
        return make.arrays[f"layers/{path}"][number]

    def query_key_value(kind: str, *rows: int) -> Any:
        """The arrays of all three beside each other, each as a matrix of so many rows, or as a vector."""
        parts = [of(f"attention/{name}/{kind}").reshape(*rows, -1) for name in ("query", "key_value")]
        return torch.cat(parts, -1)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm, self.ffn_norm = (
                make.norm(f"layers/{name}_norm", number) for name in ("attention", "ffn")
            )
            self.query_key_value = make.linear(query_key_value("weight", make.hidden), query_key_value("bias"))
            self.out = make.linear(of("attention/out/weight").reshape(-1, make.hidden), of("attention/out/bias"))
            self.ffn_in, self.ffn_out = (
                make.linear(of(f"ffn/{way}/weight"), of(f"ffn/{way}/bias")) for way in ("in", "out")
            )

        def forward(self, x: Any) -> Any:
            examples, length, _ = x.shape
            parts = self.query_key_value(self.attention_norm(x)).chunk(3, -1)
            query, key, value = (part.view(examples, length, heads, -1).transpose(1, 2) for part in parts)
            y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(examples, length, -1))
            y = functional.gelu(self.ffn_in(self.ffn_norm(x)), approximate="tanh")
            return x + self.ffn_out(y)

    return Layer()


if __name__ == "__main__":
    serve(Torch, ("torch", "numpy"))
