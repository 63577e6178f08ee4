"""The mutants that `mutants.py` runs: one changed line each, of every room."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MUTANTS", "Mutant"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A text of a module that occurs once in it, what replaces it, and the tests that must fail."""

    path: str
    old: str
    new: str
    tests: list[str]

    @property
    def room(self) -> str:
        """The folder of the package that the module is in."""
        return self.path.partition("/")[0]


_CLI = "tests/api/test_cli.py"
_COMPARED = "tests/api/test_checkpoint_numbers.py"
_HANDLE = "tests/unit/test_handle.py"
_HOSTILE = "tests/format/test_interop_hostile.py"
_MANAGER = "tests/api/test_manager.py"
_OPENED = "tests/api/test_checkpoint.py"
_PRUNE = "tests/protocol/test_prune.py"
_RETENTION = "tests/unit/test_retention.py"
_SCHEDULE = "tests/unit/test_schedule.py"
_WORKER = "tests/unit/test_worker_save.py"

_MANAGER_MUTANTS = [
    Mutant(
        "manager/retention.py",
        "if newest is None or by_step(folder) > by_step(newest):",
        "if newest is None:",
        [_RETENTION],
    ),
    Mutant("manager/retention.py", "elif folder is last:", "elif folder is None:", [_RETENTION]),
    Mutant(
        "manager/retention.py",
        "if folder.save_id else None",
        "if None else None",
        [f"{_PRUNE}::test_two_names_of_one_save_are_kept_together"],
    ),
    Mutant(
        "manager/policies.py",
        "(2 * position + interval) //",
        "(2 * position + interval - 1) //",
        [_RETENTION],
    ),
    Mutant(
        "manager/policies.py",
        "elif candidate.age_s < self.age_s:",
        "elif candidate.age_s <= self.age_s:",
        [_RETENTION],
    ),
    Mutant("manager/policies.py", "[: -self.n - 1 : -1]", "[: -self.n : -1]", [_RETENTION]),
    Mutant(
        "manager/policies.py",
        "(sign * values[index], index)",
        "(sign * values[index], -index)",
        [_RETENTION],
    ),
    Mutant(
        "manager/prune.py",
        "or newest is None or by_step(info) >= by_step(newest):",
        "or newest is None:",
        [_PRUNE],
    ),
    Mutant(
        "manager/prune.py",
        "if present is None or present.save_id != newest.save_id:",
        "if present is None:",
        [_PRUNE],
    ),
    Mutant(
        "manager/prune.py",
        "protected = {**dict.fromkeys(links, _LINK), **_link_targets(links)}",
        "protected = dict.fromkeys(links, _LINK)",
        [f"{_PRUNE}::test_a_link_made_after_the_plan_counts"],
    ),
    Mutant(
        "manager/prune.py",
        'if status == "foreign":',
        'if status == "unknown":',
        [f"{_PRUNE}::test_a_stock_save_under_a_pruned_name_stays"],
    ),
    Mutant(
        "manager/names_in_use.py",
        "is_free = name not in self.reasons()",
        "is_free = True",
        [f"{_MANAGER}::test_what_is_being_loaded_or_saved_is_not_pruned"],
    ),
    Mutant(
        "manager/names_in_use.py",
        "self.reasons().get(name) != _DELETING",
        'self.reasons().get(name) != ""',
        [f"{_MANAGER}::test_a_user_waits_until_a_deletion_has_ended"],
    ),
    Mutant("manager/notices.py", "and since_s < _REPEATED_S:", "and since_s < 0:", [_SCHEDULE]),
    Mutant(
        "manager/notices.py",
        "return not self._is_closed and os.getpid() == self._pid",
        "return not self._is_closed",
        [f"{_SCHEDULE}::test_a_forked_child_is_ended_by_the_signal"],
    ),
    Mutant(
        "manager/schedule.py",
        "self._every_steps and step > 0 and",
        "self._every_steps and step >= 0 and",
        [f"{_MANAGER}::test_steps_and_seconds_say_when_to_save"],
    ),
    Mutant(
        "manager/early_rendezvous.py",
        "str(max(int(bound)",
        "str(min(int(bound)",
        [f"{_SCHEDULE}::test_all_ranks_meet_at_one_turn_whatever_their_pace"],
    ),
    Mutant(
        "manager/resume.py",
        "if self._reload_count > _MAX_RELOADS:",
        "if self._reload_count > 100 * _MAX_RELOADS:",
        [f"{_MANAGER}::test_what_is_overwritten_again_and_again_is_an_error"],
    ),
    Mutant(
        "manager/folders.py",
        "if state.problem is None or isinstance(state.problem, IntegrityError):",
        "if state.problem is None or isinstance(state.problem, CheckpointError):",
        [f"{_PRUNE}::test_a_newer_format_is_no_reason_to_take_an_older_checkpoint"],
    ),
    Mutant(
        "manager/mirror.py",
        "return not is_same and begun_s(copied.info) <= begun_s(state.info)",
        "return not is_same",
        ["tests/api/test_mirror.py::test_a_disk_that_comes_back_with_an_older_save_harms_nothing"],
    ),
    Mutant(
        "manager/root.py",
        'if isinstance(error, StorageError) and error.kind != "permission":',
        'if isinstance(error, StorageError) and error.kind == "not-found":',
        ["tests/api/test_mirror.py::test_a_step_that_cannot_be_read_is_no_missing_one"],
    ),
    Mutant(
        "manager/selection.py",
        'if not name or parent.endswith(":/"):',
        "if not name:",
        [f"{_MANAGER}::test_a_url_that_cannot_be_restored_is_an_error"],
    ),
    Mutant(
        "manager/delete.py",
        "if path is not None and path.is_symlink():",
        "if path is None:",
        [f"{_PRUNE}::test_removing_a_link_leaves_what_it_means"],
    ),
    Mutant(
        "manager/step_save.py",
        "ended.save_id if ended.state is SaveState.COMMITTED else None",
        "ended.save_id if ended.state.is_final else None",
        [_MANAGER],
    ),
    Mutant(
        "manager/names.py",
        "<= _MAX_STEP and self.name_of(step) == name else None",
        "<= _MAX_STEP else None",
        [f"{_RETENTION}::test_a_name_is_one_that_a_step_has_or_none"],
    ),
]

_CLI_MUTANTS = [
    Mutant(
        "cli/app.py",
        "{shown(' '.join(message.split()))}",
        "{' '.join(message.split())}",
        [f"{_CLI}::test_no_name_in_an_error_reaches_the_terminal_as_it_is"],
    ),
    Mutant(
        "cli/app.py",
        "return FOUND if isinstance(error, IntegrityError) else COULD_NOT_RUN",
        "return COULD_NOT_RUN",
        [_CLI],
    ),
    Mutant(
        "cli/app.py", "_say(scrub(told))", "_say(told)", [f"{_CLI}::test_secrets_are_never_printed"]
    ),
    Mutant("cli/output.py", "click.echo(shown(line))", "click.echo(line)", [_CLI]),
    Mutant(
        "cli/output.py",
        'if found & {f"{COMMITS}/", STOCK_METADATA}:',
        'if found & {f"{COMMITS}/"}:',
        [_CLI],
    ),
    Mutant(
        "cli/options.py",
        "if numbers[2] == 0:",
        "if numbers[2] == -9:",
        [f"{_CLI}::test_what_cannot_run_exits_with_two_and_one_line"],
    ),
    Mutant(
        "cli/options.py",
        "return float(match[1]) * _SECONDS[match[2]]",
        "return float(match[1])",
        [_CLI],
    ),
    Mutant(
        "cli/options.py",
        "_TEXT_KEYS.fullmatch(words[-1].lower())",
        "_TEXT_KEYS.fullmatch(words[-1])",
        [f"{_CLI}::test_options_are_of_the_type_that_file_systems_expect"],
    ),
    Mutant("cli/values.py", "whole[: _EDGE + 1]", "whole[:_EDGE]", ["tests/api/test_cli_cat.py"]),
    Mutant(
        "cli/values.py",
        "{shown(tensor.fqn)}  {tensor.dtype}",
        "{tensor.fqn}  {tensor.dtype}",
        ["tests/api/test_cli_cat.py"],
    ),
    Mutant(
        "cli/values.py",
        "if slice(None, None, -1) in selection.final:",
        "if slice(None, None, -2) in selection.final:",
        ["tests/api/test_cli_cat.py::test_files_have_the_elements_in_numpys_order"],
    ),
    Mutant(
        "cli/look.py",
        "return COULD_NOT_RUN if problems else SOUND",
        "return SOUND",
        ["tests/stores/test_bounded_reads.py::test_a_folder_that_may_not_be_read_is_not_hidden"],
    ),
    Mutant(
        "cli/look.py",
        "return SOUND if report.ok else FOUND",
        "return SOUND",
        [f"{_CLI}::test_verify_says_sound_or_what_is_damaged"],
    ),
    Mutant(
        "cli/change.py",
        "return FOUND if report.failed_exports else SOUND",
        "return SOUND",
        ["tests/api/test_copy.py::test_a_damaged_export_does_not_cost_the_copy"],
    ),
]

_INSPECT_MUTANTS = [
    Mutant(
        "inspect/reading.py",
        "if held_count != array.size:",
        "if held_count > array.size:",
        [_HOSTILE],
    ),
    Mutant(
        "inspect/numbers.py",
        "is_far = (distance > atol + rtol * size)",
        "is_far = (distance >= atol + rtol * size)",
        [f"{_COMPARED}::test_elements_within_a_tolerance_are_alike"],
    ),
    Mutant(
        "inspect/numbers.py",
        "return distance, np.maximum(np.abs(a), np.abs(b)),",
        "return distance, np.abs(b),",
        [f"{_COMPARED}::test_elements_within_a_tolerance_are_alike"],
    ),
    Mutant("inspect/numbers.py", "rtol * size) | np.isinf(distance)", "rtol * size)", [_COMPARED]),
    Mutant(
        "inspect/numbers.py",
        "bool(left == right) or (left != left and right != right)",
        "bool(left == right)",
        [f"{_COMPARED}::test_objects_are_compared_by_value"],
    ),
    Mutant(
        "inspect/torchload.py",
        "if blob.getbuffer()[: len(_ZIP_START)] != _ZIP_START:",
        "if len(blob.getbuffer()) < len(_ZIP_START):",
        [f"{_HOSTILE}::test_a_pickle_with_an_archive_of_numbers_behind_it_runs_nothing"],
    ),
    Mutant(
        "inspect/torchload.py",
        'if archive.has_record("constants.pkl"):',
        'if archive.has_record("other.pkl"):',
        [f"{_HOSTILE}::test_blobs_that_torch_cannot_read_or_would_run_are_refused"],
    ),
    Mutant(
        "inspect/torchload.py",
        "if tuple(whole.shape) != read.chunk_sizes:",
        "if len(whole.shape) != len(read.chunk_sizes):",
        [_HOSTILE],
    ),
    Mutant(
        "inspect/torchload.py",
        "if not unsafe_pickle:",
        "if unsafe_pickle is None:",
        [f"{_HOSTILE}::test_a_malicious_blob_is_refused_and_runs_nothing"],
    ),
    Mutant(
        "inspect/views.py",
        "html.escape(shown(str(text)), quote=True)",
        "html.escape(shown(str(text)), quote=False)",
        [f"{_COMPARED}::test_html_runs_nothing_and_escapes_names"],
    ),
    Mutant(
        "inspect/views.py",
        "c if c.isprintable() else",
        "c if c >= ' ' else",
        [f"{_COMPARED}::test_hostile_names_are_shown"],
    ),
    Mutant(
        "inspect/verify.py",
        "if not (save_id and check.problems and gone(store, save_id, location.url)):",
        "if not (save_id and check.problems and False):",
        ["tests/api/test_overwrite.py::test_a_verification_that_was_overtaken_begins_anew"],
    ),
    Mutant(
        "inspect/verify.py",
        "if size_bytes != file.size_bytes:",
        "if size_bytes < file.size_bytes:",
        ["tests/api/test_damage_files.py::test_files_of_another_length_are_found"],
    ),
    Mutant(
        "inspect/verify.py",
        "if {file.path: file.ref() for file in document.files} != refs:",
        "if len(document.files) != len(refs):",
        ["tests/api/test_damage_files.py"],
    ),
    Mutant(
        "inspect/checks.py",
        "if index == BLOCKER:",
        'if index == b"":',
        ["tests/api/test_consolidate_alone.py"],
    ),
    Mutant(
        "inspect/checks.py",
        "if not is_as_written or tag.names",
        "if tag.names",
        ["tests/api/test_consolidate_alone.py::test_every_byte_of_an_export_counts"],
    ),
    Mutant(
        "inspect/checks.py",
        "if found.size_bytes < end:",
        "if found.size_bytes <= end:",
        ["tests/api/test_stock_metadata.py"],
    ),
    Mutant(
        "inspect/checks.py",
        "is_stale=None not in (head, tag.save_id) and head != tag.save_id",
        "is_stale=head is None",
        ["tests/api/test_consolidate_alone.py"],
    ),
    Mutant(
        "inspect/lazy_tensor.py",
        "at = operator.index(entry) % shape[dim]",
        "at = abs(operator.index(entry))",
        [f"{_OPENED}::test_an_index_gives_what_it_gives_in_numpy"],
    ),
    Mutant(
        "inspect/lazy_tensor.py",
        "if copy is False:",
        "if copy is True:",
        [f"{_OPENED}::test_numpys_protocols_are_kept"],
    ),
]

_BACKGROUND_MUTANTS = [
    Mutant(
        "background/handle.py",
        "if self._error is not None and not self._is_copied:",
        "if self._error is not None:",
        [_HANDLE],
    ),
    Mutant(
        "background/handle.py",
        "next(states, SaveState.FAILED) if info is None else SaveState.COMMITTED",
        "next(states, SaveState.FAILED)",
        [_HANDLE],
    ),
    Mutant("background/handle.py", "error = self._cancelled\n", "error = None\n", [_HANDLE]),
    Mutant(
        "background/handle.py", "if os.getpid() != process_id:", "if process_id == 0:", [_HANDLE]
    ),
    Mutant(
        "background/handle.py",
        "self._call(callback, BaseException)",
        "self._call(callback, Exception)",
        [_HANDLE],
    ),
    Mutant("background/arenas.py", "if arena.is_retired:", "if arena.size_bytes < 0:", [_HANDLE]),
    Mutant(
        "background/arenas.py",
        "if arena.size_bytes >= need_bytes:",
        "if arena.size_bytes > need_bytes:",
        [_HANDLE],
    ),
    Mutant("background/arenas.py", "if self._is_closed:", "if self._kind is None:", [_HANDLE]),
    Mutant(
        "background/save_queue.py",
        "if is_read or not staging.done():",
        "if not staging.done():",
        [_HANDLE],
    ),
    Mutant(
        "background/priorities.py",
        "not -20 <= nice <= 19",
        "not -20 < nice < 19",
        ["tests/unit/test_priorities.py"],
    ),
    Mutant(
        "background/interpreter_exit.py",
        '(timeouts.write if own.phase == "commit" else 0.0)',
        "0.0",
        [_HANDLE],
    ),
    Mutant(
        "background/interpreter_exit.py",
        "rank.heard_s - rank.idle_s",
        "rank.heard_s",
        [f"{_HANDLE}::test_a_rank_that_is_silent_makes_no_progress_by_hearsay"],
    ),
    Mutant(
        "background/interpreter_exit.py",
        "if ended_count > previous_count:",
        "if ended_count < previous_count:",
        [f"{_HANDLE}::test_the_end_of_one_save_gives_time_to_the_next"],
    ),
    Mutant(
        "background/worker_save.py",
        "if more_bytes > 0 or more_files > 0:",
        "if more_bytes > 0:",
        [_WORKER],
    ),
    Mutant(
        "background/worker_save.py",
        'if response.is_unexpected and self._operation.deadline.phase == "commit":',
        "if response.is_unexpected and self._file == -1:",
        [_WORKER],
    ),
    Mutant(
        "background/worker_save.py",
        'if "commit" in self._worker.kill():',
        'if "never" in self._worker.kill():',
        [_WORKER],
    ),
    Mutant(
        "background/worker_save.py",
        "                quiet_looks = 0\n",
        "                quiet_looks += 0\n",
        [_WORKER],
    ),
]

MUTANTS: list[Mutant] = [
    *_MANAGER_MUTANTS,
    *_CLI_MUTANTS,
    *_INSPECT_MUTANTS,
    *_BACKGROUND_MUTANTS,
]
