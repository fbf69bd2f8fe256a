"""Encodes the prompts of coming iterations in one go, so that the text encoders can leave the memory."""

from __future__ import annotations

from collections.abc import Sequence

from sage_grpo.data.prompts import Prompt, PromptStream, look_ahead
from sage_grpo.distributed.world import World
from sage_grpo.models.base import VelocityModel
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.inputs import conditions_of
from sage_grpo.training.planner import Planner
from sage_grpo.types import Conditioning
from sage_grpo.utils.clock import Clock


class EncodeAhead:
    """This rank's prompts of the iterations up to `data.encode_ahead`, and the held-out ones."""

    def __init__(
        self,
        config: TrainConfig,
        model: VelocityModel,
        planner: Planner,
        held_out: Sequence[Prompt],
        world: World,
        clock: Clock,
    ) -> None:
        self.config, self.model, self.planner, self.world, self.clock = config, model, planner, world, clock
        self.held_out = held_out[: config.evaluate.prompts]
        self.encoded: dict[Prompt, Conditioning] = {}
        """The model itself keeps no conditionings in memory."""
        self.until = 0
        """Iteration up to which prompts are encoded."""

    def run(self, stream: PromptStream, iteration: int) -> None:
        """Encode the prompts from this iteration on, unless the next ones are encoded."""
        config, ranks = self.config, range(self.world.size)
        if self.until >= min(config.iterations, iteration + 1 + config.rollout.staleness):
            return
        coming = PromptStream(stream.prompts, config.seed)
        coming.position = stream.position
        batches = (coming.take(config.batch.prompts) for _ in range(iteration, config.iterations))
        places = [self.planner.places(rank) for rank in ranks]
        least = (1 + config.rollout.staleness) * config.batch.prompts if config.rollout.staleness else 0
        near = look_ahead(batches, places, max(config.data.encode_ahead, least))
        training = [batch[place] for batch in near for place in places[self.world.rank]]
        prompts = list(dict.fromkeys([*training, *self.held_out]))
        with self.clock("encode"):
            tick = self.clock.ticker(len(prompts))
            self.encoded = {prompt: self.encoded[prompt] for prompt in prompts if prompt in self.encoded}
            for prompt in prompts:
                if prompt not in self.encoded:
                    (self.encoded[prompt],) = conditions_of(self.model, [prompt])
                tick()
        self.model.unload_text()
        self.until = iteration + len(near)
