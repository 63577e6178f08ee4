"""Saves in the background: staging, threads, worker processes, handles.

An `AsyncSaver` copies the state to an `Arena` (`StagingJob`) and puts a `PendingSave` into its
`SaveQueue`, whose thread runs one save after another. The steps of a save run there, as `RankSave`,
or in the worker process: `WorkerSave` then calls them over the pipe of a `WorkerProcess`, at whose
other end a `Worker` runs the `RankSave`. The caller has a `SaveHandle`.
"""
