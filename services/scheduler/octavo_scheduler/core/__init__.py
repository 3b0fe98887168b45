"""The scheduler's core: pure. No sockets, clocks, randomness or torch; time comes in as an argument.

One owner per resource:

* ``free_list.FreeList`` – the order in which unused blocks are taken,
* ``block_pool.BlockPool`` – blocks, their references and what content they hold (the prefix cache),
* ``prefix_cache.PrefixCache`` – what a sequence finds when admitted, and what it leaves for others,
* ``slots.SlotTable`` – the sequences that run, as columns,
* ``waiting.WaitingQueue`` – those that wait, in the policy's order,
* ``in_flight.InFlight`` – plans that were sent and not yet acknowledged,
* ``scheduler.Scheduler`` – the step: grants, preemption, admission, commit.
"""
