"""Commands around training: plan, doctor, probe, inspect, compare, report and study. Nothing below imports them."""
