"""Ranks that agree, meet and fail together, over a torch.distributed store.

An `Operation` is one save, load or export of all ranks. It has a number in its `Lane`, and consists
of rounds: in each `Round` the members send payloads, the coordinator decides, and all go on, or all
fail. `Coordinator` and `Member` do that; `OperationRounds` holds the present round, fails it from
any thread and ends the operation. All keys go through `KeyValues`; a `KeyListener` waits for the
release of the round. A `FailureDetector` sends `Heartbeats` and watches the other ranks meanwhile.
"""
