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

    def train(self, case: str, microbatches: int, steps: int) -> list[float]:
        """As `trainers.Trainer`."""
        found: list[float] = []
        for _ in range(steps):
            found = self._step(case, microbatches)
        return found

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
    import torch
    from torch import nn
    from torch.nn import functional

    each = sizes["layers"] // ranks
    heads, hidden = sizes["heads"], sizes["hidden"]

    def linear(weight: Any, bias: Any) -> nn.Linear:
        """A linear layer with the weights of a matrix [in, out]."""
        made = nn.Linear(*weight.shape)
        made.weight = nn.Parameter(weight.T.contiguous().clone())
        made.bias = nn.Parameter(bias.clone())
        made.weight.decays = True
        return made

    def norm(path: str, *layer: int) -> nn.LayerNorm:
        made = nn.LayerNorm(hidden, eps=1e-5)
        made.weight = nn.Parameter(arrays[f"{path}/scale"][layer].clone())
        made.bias = nn.Parameter(arrays[f"{path}/bias"][layer].clone())
        return made

    def table(path: str) -> nn.Embedding:
        made = nn.Embedding.from_pretrained(arrays[path].clone(), freeze=False)
        made.weight.decays = True
        return made

    class Layer(nn.Module):
        """Queries, keys and values come out of one matrix."""

        def __init__(self, number: int) -> None:
            super().__init__()
            path = "layers/attention"
            query, query_bias = (arrays[f"{path}/query/{name}"][number] for name in ("weight", "bias"))
            rest, rest_bias = (arrays[f"{path}/key_value/{name}"][number] for name in ("weight", "bias"))
            self.attention_norm, self.ffn_norm = (norm(f"layers/{name}_norm", number) for name in ("attention", "ffn"))
            self.query_key_value = linear(
                torch.cat([query.reshape(hidden, -1), rest.reshape(hidden, -1)], 1),
                torch.cat([query_bias.reshape(-1), rest_bias.reshape(-1)]),
            )
            out = arrays[f"{path}/out/weight"][number]
            self.out = linear(out.reshape(-1, hidden), arrays[f"{path}/out/bias"][number])
            self.ffn_in, self.ffn_out = (
                linear(arrays[f"layers/ffn/{way}/weight"][number], arrays[f"layers/ffn/{way}/bias"][number])
                for way in ("in", "out")
            )

        def forward(self, x: Any) -> Any:
            examples, length, _ = x.shape
            parts = self.query_key_value(self.attention_norm(x)).chunk(3, -1)
            query, key, value = (part.view(examples, length, heads, -1).transpose(1, 2) for part in parts)
            y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(examples, length, -1))
            y = functional.gelu(self.ffn_in(self.ffn_norm(x)), approximate="tanh")
            return x + self.ffn_out(y)

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(number) for number in range(rank * each, (rank + 1) * each))
            self.tokens: Any = None
            self.positions: Any = None
            self.final: Any = None
            self.head: Any = None
            if rank == 0:
                self.tokens = table("embedding/tokens")
                self.positions = nn.Parameter(arrays["embedding/positions"].clone())
                self.positions.decays = True
            if rank == ranks - 1:
                self.final = norm("final")
                self.head = nn.Linear(hidden, sizes["vocabulary"], bias=False)
                self.head.weight = nn.Parameter(arrays["head/tokens"].clone())
                self.head.weight.decays = True

        def forward(self, x: Any) -> Any:
            if self.tokens is not None:
                x = self.tokens(x) + self.positions
            for layer in self.layers:
                x = layer(x)
            return x if self.head is None else self.head(self.final(x))

    return Stage()


if __name__ == "__main__":
    serve(Torch, ("torch", "numpy"))
