"""What can be chosen in the training of a learned reward; light, so that the command's help need not load torch."""

from __future__ import annotations

from pathlib import Path

from sage_grpo.config.ranges import Count, Natural, NotNegative, Positive, Seed, Share, checked


@checked
class Biases:
    """How annotators are wrong. Impressions are on the scale of the judge's parts, 0 to 1."""

    annotators: Count = 3
    """Annotators; each of them votes on every pair. They differ in how strong their biases are."""
    noise: NotNegative = 0.15
    """Standard deviation of what an annotator adds to an impression by chance."""
    colour: NotNegative = 0.12
    """How much better a clip looks that is more saturated by one standard deviation."""
    motion: NotNegative = 0.12
    """How much better a clip moves in which more changes, by one standard deviation."""
    forgiven: Share = 0.8
    """Share of a wrong texture that is not noticed."""


@checked
class RewardOptions(Biases):
    """Options of training a learned reward; the biases of its annotators are among them."""

    out: Path = Path("scenes-reward")
    """Folder for the result: config.json, model.safetensors and scores.json."""
    model: Path | None = None
    """A pipeline folder, clips of which are voted on as well; None takes renders with faults alone."""
    sampled_share: Share = 0.5
    """With a model: the share of the prompts whose clips are samples of it."""
    prompts: Count = 12_000
    """Prompts to vote on."""
    group: Count = 4
    """Clips of a prompt; all pairs of them are voted on."""
    heldout: Count = 512
    """Further prompts, of combinations that are held out, on which agreement is measured."""
    minutes: NotNegative = 4.0
    """Minutes of training."""
    steps: Natural = 0
    """Steps of training instead of minutes."""
    batch: Count = 64
    """Prompts a step."""
    lr: Positive = 1e-3
    """Peak learning rate."""
    width: Count = 192
    """Width of the network, a multiple of 32."""
    layers: Count = 3
    """Layers of the network."""
    frames: Count = 6
    """Frames of a clip that the network looks at."""
    seed: Seed = 0
    """Seed of everything."""
    graphs: bool = True
    """Capture training steps as CUDA graphs (falls back to plain steps where that fails)."""
    report_seconds: NotNegative = 10.0
    """Seconds between two printed lines."""
    device: str = ""
    """Where to train; empty takes cuda where there is one, else cpu."""
