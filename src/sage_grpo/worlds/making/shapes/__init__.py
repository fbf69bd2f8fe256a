"""How the checkpoint under worlds/shapes/assets was made: `sage-grpo shapes pretrain`. Read pretrain.py first: options, networks, imperfect data, training, stages and score serve it."""
