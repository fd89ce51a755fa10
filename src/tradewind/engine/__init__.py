"""A request's life: sequence states, queue order, token budget, scheduler, loop, client. Decides; computes nothing."""
