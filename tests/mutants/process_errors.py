"""Errors that need several processes to show."""

from __future__ import annotations

from mutants.mutant import Mutant

EQUAL = "parallel/test_equal_runs.py::test_every_layout_is_the_same_run"
DATA = (f"{EQUAL}[hunyuan15_t2v-False-1.0-2-1-1]",)
SEQUENCE = (f"{EQUAL}[wan_t2v-False-2.0-2-2-1]",)
ATTENTION = ("parallel/test_equal_runs.py::test_split_attention_is_attention[7-5-6-3]",)

MUTANTS = (
    Mutant(
        "gradients of several ranks are averaged where they should add up",
        "train/update.py",
        "step.velocity.backward(scale * loss.total)",
        "step.velocity.backward(loss.total)",
        DATA,
    ),
    Mutant(
        "the scale of the loss does not count the ranks of one clip",
        "parallel/fsdp.py",
        "float(self.world.processes) if self.networks else 1.0",
        "float(self.world.size) if self.networks else 1.0",
        SEQUENCE,
    ),
    Mutant(
        "gradients are never synchronised",
        "train/update.py",
        "if number == len(items) - 1:",
        "if number == len(items):",
        DATA,
    ),
    Mutant(
        "idle passes count in the loss",
        "train/trainer.py",
        "weight=torch.zeros_like(items[0].weight))",
        "weight=items[0].weight)",
        ("train/test_settings_arrive.py::test_passes_that_only_keep_ranks_in_step_have_no_weight",),
    ),
    Mutant(
        "tokens are split as if all ranks had equally many",
        "parallel/context.py",
        "tokens.narrow(dim, sum(counts[: self.rank]), counts[self.rank])",
        "tokens.narrow(dim, counts[0] * self.rank, counts[self.rank])",
        ATTENTION,
    ),
    Mutant(
        "the gradient of merged tokens goes to the wrong rank",
        "parallel/collectives.py",
        "ctx.bounds = (sum(counts[:own]), sum(counts[: own + 1]))",
        "ctx.bounds = (0, counts[own])",
        ATTENTION,
    ),
    Mutant(
        "sums over ranks count the ranks of one clip twice",
        "parallel/world.py",
        "self.gather(values[None])[:: self.layout.sequence].sum(0)",
        "self.gather(values[None]).sum(0)",
        SEQUENCE,
    ),
    Mutant(
        "rewards of several ranks are not put in order",
        "train/trainer.py",
        "order = torch.argsort((table.places[:, 0] * plan.group_size + table.places[:, 1]).long())",
        "order = torch.arange(len(table.total))",
        SEQUENCE,
    ),
    Mutant(
        "ranks of one clip score it twice",
        "parallel/world.py",
        "return range(self.sequence_rank, count, self.layout.sequence)",
        "return range(count)",
        ("parallel/test_layout.py::test_ranks_of_one_clip_share_the_scoring",),
    ),
)
