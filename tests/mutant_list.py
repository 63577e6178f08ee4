"""The mutants that `mutants.py` runs: one changed line each, of every room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["MUTANTS", "Mutant"]

_QUICK = frozenset({"api", "format", "protocol", "stores", "unit"})


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

    @property
    def tier(self) -> Literal["quick", "other"]:
        """The tier of its tests: that of plain `pytest`, or one of the others."""
        folders = {test.split("/")[1] for test in self.tests}
        return "quick" if folders <= _QUICK else "other"


_ALONE = "tests/api/test_consolidate_alone.py"
_BOUNDS = "tests/api/test_convert_bounds.py"
_CASTS = "tests/api/test_casts.py"
_CLI = "tests/api/test_cli.py"
_COMMIT = "tests/protocol/test_commit.py"
_COMPARED = "tests/api/test_checkpoint_numbers.py"
_CONSOLIDATION = "tests/unit/test_consolidation.py"
_CONVERT = "tests/api/test_convert.py"
_COPY = "tests/api/test_copy.py"
_DAMAGED = "tests/format/test_damage_documents.py"
_DOCUMENTS = "tests/format/test_documents.py"
_HANDLE = "tests/unit/test_handle.py"
_HOSTILE = "tests/format/test_interop_hostile.py"
_IDENTITY = "tests/unit/test_identity.py"
_LISTED = "tests/stores/test_listed_names.py"
_LOCAL = "tests/stores/test_store_local.py"
_MANAGER = "tests/api/test_manager.py"
_MANIFESTS = "tests/format/test_manifests.py"
_OPENED = "tests/api/test_checkpoint.py"
_FLIPPED = "tests/api/test_flipped_copies.py"
_COPY_PART = "tests/api/test_copy_part.py"
_OVERTAKEN = "tests/protocol/test_overtaken_exports.py"
_OVERWRITE = "tests/api/test_overwrite.py"
_POSIX = "tests/protocol/test_posix_faults.py"
_PRUNE = "tests/protocol/test_prune.py"
_REFUSED = "tests/api/test_refused_states.py"
_REMOTE = "tests/stores/test_store_remote_faults.py"
_REPLACED = "tests/protocol/test_replaced_files.py"
_RETENTION = "tests/unit/test_retention.py"
_RETRY = "tests/stores/test_store_retry.py"
_REUSE = "tests/api/test_reuse.py"
_ROUNDS = "tests/protocol/test_rounds.py"
_SCHEDULE = "tests/unit/test_schedule.py"
_SHARED_DAMAGE = "tests/faults/test_shared_damage.py"
_SHARED_UPLOAD = "tests/stores/test_store_shared_upload.py"
_STAGING = "tests/ranks/test_staging.py"
_STOCK = "tests/format/test_stockmeta.py"
_TENSORS = "tests/format/test_tensorfile.py"
_TRANSFER = "tests/stores/test_transfer.py"
_UPKEEP = "tests/protocol/test_commit_upkeep.py"
_WORKER = "tests/unit/test_worker_save.py"
_WRITER = "tests/stores/test_filewriter.py"

_MANAGER_MUTANTS = [
    Mutant(
        "manager/root.py",
        "if self.damage_count > 0 and not is_deep:",
        "if self.damage_count < 0:",
        [f"{_SHARED_DAMAGE}::test_damage_that_is_found_while_another_checkpoint_is_checked_counts"],
    ),
    Mutant("manager/root.py", "self.damage_count += 1", "pass", [_SHARED_DAMAGE]),
    Mutant(
        "manager/step_save.py",
        "if self._root.damage_count == self._damage_count:",
        "if self._name:",
        [f"{_SHARED_DAMAGE}::test_a_save_that_links_the_file_while_its_damage_is_found_is_no_base"],
    ),
    Mutant(
        "manager/resume.py",
        "if not root.damage_count or",
        "if root.location or",
        [f"{_SHARED_DAMAGE}::test_a_restore_of_some_values_vouches_for_no_others"],
    ),
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
        [f"{_PRUNE}::test_no_plan_deletes_what_is_newer_than_its_newest"],
    ),
    Mutant(
        "manager/prune.py",
        "if present is None or present.save_id != newest.save_id:",
        "if present is None:",
        ["tests/faults/test_prune_attack.py::test_without_its_newest_a_plan_deletes_nothing"],
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
        [f"{_PRUNE}::test_a_stock_save_into_leftovers_is_none"],
    ),
    Mutant(
        "manager/names_in_use.py",
        "is_free = name not in self.reasons()",
        "is_free = True",
        ["tests/unit/test_names_in_use.py"],
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
        [f"{_PRUNE}::test_a_storage_that_does_not_answer_is_no_unreadable_checkpoint"],
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
        ["tests/unit/test_step_save.py"],
    ),
    Mutant(
        "manager/names.py",
        "<= _MAX_STEP and self.name_of(step) == name else None",
        "<= _MAX_STEP else None",
        [f"{_RETENTION}::test_another_spelling_of_a_number_is_no_step"],
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
        "return UNSOUND if isinstance(error, IntegrityError) else COULD_NOT_RUN",
        "return COULD_NOT_RUN",
        [_CLI],
    ),
    Mutant(
        "cli/app.py",
        '_print_error(scrub(f"{what}{step}"))',
        '_print_error(f"{what}{step}")',
        [f"{_CLI}::test_secrets_are_never_printed"],
    ),
    Mutant(
        "cli/output.py",
        "click.echo(shown(line))",
        "click.echo(line)",
        [f"{_CLI}::test_no_name_that_is_printed_reaches_the_terminal_as_it_is"],
    ),
    Mutant(
        "cli/output.py",
        'if paths & {f"{COMMITS}/", STOCK_METADATA}:',
        'if paths & {f"{COMMITS}/"}:',
        [_CLI],
    ),
    Mutant(
        "cli/options.py",
        "numbers[2] < 1:",
        "numbers[2] < -9:",
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
        "_TEXT_KEYS.fullmatch(parts[-1].lower())",
        "_TEXT_KEYS.fullmatch(parts[-1])",
        [f"{_CLI}::test_options_are_of_the_type_that_file_systems_expect"],
    ),
    Mutant("cli/values.py", "whole[: _EDGE + 1]", "whole[:_EDGE]", ["tests/api/test_cli_cat.py"]),
    Mutant(
        "cli/values.py",
        "{shown(tensor.fqn)}  {tensor.dtype}",
        "{tensor.fqn}  {tensor.dtype}",
        [f"{_CLI}::test_no_name_that_is_printed_reaches_the_terminal_as_it_is"],
    ),
    Mutant(
        "cli/values.py",
        "whole[some.start : some.stop]",
        "whole[: some.stop - some.start]",
        ["tests/api/test_cli_cat.py::test_files_have_the_elements_in_numpys_order"],
    ),
    Mutant(
        "cli/look.py",
        "return COULD_NOT_RUN if problems else SOUND",
        "return SOUND",
        [f"{_CLI}::test_ls_with_a_folder_that_may_not_be_read_exits_with_two"],
    ),
    Mutant(
        "cli/look.py",
        "return SOUND if report.ok else UNSOUND",
        "return SOUND",
        [f"{_CLI}::test_verify_says_sound_or_what_is_damaged"],
    ),
]

_INSPECT_MUTANTS = [
    Mutant(
        "inspect/reading.py",
        "if covered_count != array.size:",
        "if covered_count > array.size:",
        [f"{_OPENED}::test_elements_that_no_chunk_holds_are_not_made_up"],
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
        "([0-9]{1,18})",
        "([0-9]+)",
        [f"{_ALONE}::test_names_with_thousands_of_digits_are_exported"],
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
        [f"{_CLI}::test_no_name_that_is_printed_reaches_the_terminal_as_it_is"],
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
        [f"{_DAMAGED}::test_documents_that_contradict_each_other_are_found"],
    ),
    Mutant(
        "inspect/checks.py",
        "if not is_as_written or tag.names",
        "if tag.names",
        ["tests/api/test_consolidate_alone.py::test_an_index_of_other_bytes_is_found"],
    ),
    Mutant(
        "inspect/checks.py",
        "if info.size_bytes < end:",
        "if info.size_bytes <= end:",
        [f"{_OPENED}::test_a_sound_checkpoint_of_any_format_is_called_so"],
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
        "background/save_state.py",
        "is not None:\n        return SaveState.COMMITTED",
        "is None:\n        return SaveState.COMMITTED",
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
    Mutant(
        "background/arenas.py",
        "if arena.is_retired:",
        "if arena.size_bytes < 0:",
        [f"{_STAGING}::test_an_arena_that_a_device_may_still_write_to_is_not_reused"],
    ),
    Mutant(
        "background/arenas.py",
        "if arena.size_bytes >= need_bytes:",
        "if arena.size_bytes > need_bytes:",
        ["tests/unit/test_arenas.py"],
    ),
    Mutant(
        "background/arenas.py",
        "if self._is_closed:",
        "if self._kind is None:",
        ["tests/unit/test_arenas.py"],
    ),
    Mutant(
        "background/save_queue.py",
        "if is_read or not staging.done():",
        "if not staging.done():",
        ["tests/unit/test_arenas.py"],
    ),
    Mutant(
        "background/priorities.py",
        "not -20 <= nice <= 19",
        "not -20 < nice < 19",
        ["tests/unit/test_priorities.py"],
    ),
    Mutant(
        "background/interpreter_exit.py",
        "rank.heard_s - rank.idle_s",
        "rank.heard_s",
        [f"{_HANDLE}::test_an_exit_waits_for_no_rank_that_only_lives"],
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
        "                quiet_checks = 0\n",
        "                quiet_checks += 0\n",
        [_WORKER],
    ),
]

_STORE_MUTANTS = [
    Mutant(
        "store/backends/generic.py",
        "if is_temporary and path_flaw(info.path) is None:",
        "if is_temporary:",
        [f"{_LISTED}::test_no_unfinished_file_with_an_unsafe_name_is_removed"],
    ),
    Mutant(
        "store/backends/temp_files.py",
        "self._posix.fsync(fd)",
        "self._posix.fstat(fd)",
        [f"{_POSIX}::test_what_was_reported_done_survives_a_power_cut"],
    ),
    Mutant(
        "store/backends/temp_files.py",
        "self._posix.sync_names(self._folder)",
        "self._posix.stat(self._folder)",
        [f"{_POSIX}::test_what_was_reported_done_survives_a_power_cut"],
    ),
    Mutant(
        "store/backends/temp_files.py",
        "if stat.st_size != total_bytes:",
        "if stat.st_size > total_bytes:",
        [f"{_POSIX}::test_a_write_that_was_not_carried_out_is_noticed"],
    ),
    Mutant(
        "store/backends/temp_files.py",
        "if (target.st_dev, target.st_ino) == self._identity:",
        "if target.st_ino and self._identity:",
        [f"{_POSIX}::test_a_lost_link_is_not_confused_with_a_backup"],
    ),
    Mutant(
        "store/backends/temp_files.py",
        "if alone and self._user_count:",
        "if alone and self._user_count < 0:",
        [_RETRY, _POSIX],
    ),
    Mutant(
        "store/backends/temp_files.py",
        "{target_name[:_KEPT_NAME_CHARS]}",
        "{target_name}",
        [f"{_LOCAL}::test_a_long_name_leaves_room_for_the_temporary_one"],
    ),
    Mutant(
        "store/backends/links.py",
        "posix.link(source, temporary)",
        "os.symlink(source, temporary)",
        [f"{_REUSE}::test_each_checkpoint_is_whole_by_itself"],
    ),
    Mutant(
        "store/backends/local.py",
        "if not is_near or folder.startswith",
        "if folder.startswith",
        [f"{_SHARED_UPLOAD}::test_a_token_names_no_file_elsewhere"],
    ),
    Mutant(
        "store/backends/local.py",
        "for folder in folders if self._sync else ():",
        "for folder in ():",
        [f"{_POSIX}::test_a_delete_is_durable_when_it_returns"],
    ),
    Mutant(
        "store/backends/local.py",
        'if self._leads_out(self._full(prefix.strip("/"))):',
        'if prefix == "..":',
        [_LISTED],
    ),
    Mutant(
        "store/backends/local.py",
        "if max_bytes is not None and stat.st_size > max_bytes:",
        "if max_bytes is not None and stat.st_size < 0:",
        ["tests/stores/test_bounded_reads.py"],
    ),
    Mutant(
        "store/backends/local.py",
        "if _version_of(self._posix.stat(full)) != version:",
        "if not version:",
        [_LOCAL],
    ),
    Mutant(
        "store/backends/posix.py",
        "os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW",
        "os.O_WRONLY | os.O_CLOEXEC",
        [_SHARED_UPLOAD, _LOCAL],
    ),
    Mutant(
        "store/backends/posix.py",
        "if self.is_link(path):",
        'if path == "":',
        [f"{_LOCAL}::test_delete_folder_follows_no_link"],
    ),
    Mutant(
        "store/calls.py",
        "and failure.kind not in _NOT_RETRIED",
        "and failure.kind not in ()",
        [f"{_RETRY}::test_what_may_help_is_repeated_and_nothing_else"],
    ),
    Mutant(
        "store/calls.py",
        'and (repeat != "if-nothing-done" or nothing_was_done(failure))',
        'and (repeat != "never" or nothing_was_done(failure))',
        [f"{_RETRY}::test_a_lost_answer_to_a_conditional_put_is_settled"],
    ),
    Mutant(
        "store/calls.py",
        "cause = cause.__cause__\n",
        "cause = cause.__cause__ or cause.__context__\n",
        [f"{_RETRY}::test_a_refused_connection_proves_that_nothing_was_done"],
    ),
    Mutant(
        "store/calls.py",
        "if delay_s >= self._left_s():",
        "if self._left_s() <= 0:",
        [f"{_RETRY}::test_delays_grow_with_full_jitter_and_end_with_the_deadline"],
    ),
    Mutant(
        "store/calls.py",
        "if len(self._refreshed) == seen_count:",
        "if len(self._refreshed) >= seen_count:",
        [
            f"{_RETRY}::test_threads_that_meet_expired_credentials_together_refresh_once",
            f"{_REMOTE}::test_expired_credentials_are_looked_up_again",
        ],
    ),
    Mutant(
        "store/store.py",
        'if not in_doubt and (writer == "nobody\'s" or not unsynced):',
        "if not in_doubt:",
        [f"{_COMMIT}::test_a_link_with_a_lost_answer_counts_an_unsynced_one_does_not"],
    ),
    Mutant(
        "store/store.py",
        'if writer == "ours" and not unsynced:',
        'if writer == "ours":',
        [f"{_COMMIT}::test_a_link_with_a_lost_answer_counts_an_unsynced_one_does_not"],
    ),
    Mutant(
        "store/store.py",
        "content.version == version else",
        "content.version != version else",
        [f"{_RETRY}::test_a_lost_answer_to_a_conditional_put_is_settled"],
    ),
    Mutant(
        "store/range_reads.py",
        "if total_bytes >= stop:",
        "if total_bytes > stop:",
        [f"{_RETRY}::test_a_response_cut_before_the_end_of_the_object_is_read_again"],
    ),
    Mutant("store/store.py", "        if not folder:\n", "        if folder is None:\n", [_LOCAL]),
    Mutant(
        "store/range_reads.py",
        "buffer.release()",
        "buffer.tobytes",
        [f"{_RETRY}::test_memory_is_not_filled_once_a_read_has_ended"],
    ),
    Mutant(
        "store/redaction.py",
        "key=len, reverse=True)",
        "key=len)",
        ["tests/unit/test_redaction.py"],
    ),
    Mutant(
        "store/upload.py",
        "if isinstance(error, AbandonedError) or not isinstance(error, CheckpointError):",
        "if not isinstance(error, CheckpointError):",
        [f"{_RETRY}::test_an_upload_with_a_part_under_way_cannot_complete"],
    ),
    Mutant(
        "store/upload.py",
        "if ours_bytes == total_bytes:",
        "if ours_bytes is not None:",
        [f"{_RETRY}::test_an_object_of_ours_that_is_too_short_is_not_complete"],
    ),
    Mutant(
        "store/backends/s3.py",
        "CopySourceIfMatch=etag)",
        "CopySourceIfNoneMatch=etag[1:])",
        [f"{_SHARED_UPLOAD}::test_a_source_that_changes_between_copies_is_noticed"],
    ),
    Mutant(
        "store/deadline.py",
        "if is_late and self.remaining_s() < _CUT_S:",
        "if is_late:",
        [f"{_RETRY}::test_the_timeout_of_a_request_is_not_called_that_of_its_phase"],
    ),
    Mutant(
        "store/monitor.py",
        "self._parent.failed(self.failure() or error)",
        "self._parent.failed(error)",
        ["tests/unit/test_relay.py"],
    ),
    Mutant(
        "store/threads.py",
        "        if worker.is_abandoned:\n            raise",
        "        if worker.moved_s < 0:\n            raise",
        [f"{_RETRY}::test_a_call_that_was_given_up_sends_no_further_request"],
    ),
]

_TRANSFER_MUTANTS = [
    Mutant(
        "transfer/pacing.py",
        "self._limit = max(1, self._limit // 2)",
        "self._limit = max(1, self._limit - 1)",
        [f"{_WRITER}::test_a_slow_down_halves_the_number_once_for_all_that_were_under_way"],
    ),
    Mutant(
        "transfer/pacing.py",
        "self._late_count = self._limit - 1",
        "self._late_count = 0",
        [f"{_WRITER}::test_a_slow_down_halves_the_number_once_for_all_that_were_under_way"],
    ),
    Mutant(
        "transfer/budget.py",
        "while self._queue[0] is not turn or self.held_bytes",
        "while self.held_bytes",
        [f"{_WRITER}::test_claims_are_served_in_their_order"],
    ),
    Mutant(
        "transfer/pacing.py",
        "self._limit = min(self._most, self._limit + 1)",
        "self._limit = self._limit + 1",
        [f"{_WRITER}::test_a_slow_down_halves_the_number_once_for_all_that_were_under_way"],
    ),
    Mutant(
        "transfer/ranges.py",
        "                self.cancelled.set()",
        "                self.cancelled.is_set()",
        [f"{_TRANSFER}::test_a_failed_load_touches_no_target_after_it_was_raised"],
    ),
    Mutant(
        "transfer/ranges.py",
        "block_end = stop if stop == length else stop - stop % read.block_bytes",
        "block_end = stop",
        [f"{_TRANSFER}::test_a_check_gets_whole_blocks"],
    ),
    Mutant(
        "transfer/ranges.py",
        "if read.check is not None and self._piece_bytes is None",
        "if read.check is not None and self._piece_bytes",
        [_TRANSFER],
    ),
    Mutant(
        "transfer/chunks.py",
        "if total != math.prod(read.chunk_sizes) * read.item_bytes:",
        "if total < math.prod(read.chunk_sizes) * read.item_bytes:",
        ["tests/unit/test_chunks.py"],
    ),
    Mutant(
        "transfer/chunks.py",
        "inner_start = start + -start % block",
        "inner_start = start",
        ["tests/unit/test_chunks.py::test_a_long_selection_that_begins_within_a_block_arrives"],
    ),
    Mutant(
        "transfer/chunks.py",
        "low, high = max(start, run.start), min",
        "low, high = start, min",
        ["tests/unit/test_chunks.py::test_every_selection_gets_what_slicing_gives"],
    ),
    Mutant(
        "transfer/workers.py",
        "if not self._cancelled:",
        "if self._threads:",
        [f"{_TRANSFER}::test_after_a_failure_no_other_job_is_begun"],
    ),
    Mutant(
        "transfer/writing.py",
        "most = options.thread_count if capabilities.parallel_parts else 1",
        "most = options.thread_count",
        [f"{_WRITER}::test_a_storage_that_takes_parts_in_order_gets_one_at_a_time"],
    ),
    Mutant(
        "transfer/writing.py",
        "return 2 if capabilities.is_remote and not capabilities.streams_parts else 1",
        "return 1",
        [_TRANSFER, _WRITER],
    ),
]

_COMMIT_MUTANTS = [
    Mutant(
        "commit/attempt.py",
        "if time.time() - ticket.began_s > _MAX_AGE_S:",
        "if ticket.began_s < 0:",
        [f"{_UPKEEP}::test_an_attempt_of_days_ago_is_not_committed"],
    ),
    Mutant(
        "commit/attempt.py",
        'if holder.type != "fence" or ticket.save_id in holder.fenced:',
        'if holder.type != "fence":',
        [f"{_UPKEEP}::test_attempts_that_never_committed_are_fenced_and_freed"],
    ),
    Mutant(
        "commit/attempt.py",
        'if holder.type != "fence" or ticket',
        "if ticket",
        [f"{_COMMIT}::test_a_slot_that_another_holds_is_lost_to_it"],
    ),
    Mutant(
        "commit/publishing.py",
        "slot_s is not None and stock_s >= slot_s:",
        "slot_s is not None and stock_s > slot_s:",
        ["tests/api/test_stock_metadata.py::test_a_stock_save_of_the_same_second_is_a_newer_one"],
    ),
    Mutant(
        "commit/slotlog.py",
        "return holder, holder.write_id == record.write_id",
        "return holder, holder.save_id == record.save_id",
        [f"{_COMMIT}::test_of_two_equal_records_only_the_first_takes_the_slot"],
    ),
    Mutant(
        "commit/slotlog.py",
        'if error.kind not in {"exists", "unknown"}:',
        'if error.kind not in {"exists"}:',
        [f"{_COMMIT}::test_a_commit_ends_as_its_answers_say"],
    ),
    Mutant(
        "commit/slotlog.py",
        'head.type != "commit" or head.save_id != reference.save_id:',
        'head.type != "commit":',
        [f"{_COMMIT}::test_a_head_that_leads_astray_is_refused"],
    ),
    Mutant(
        "transfer/objects.py",
        "if reference.size_bytes > max_bytes:",
        "if reference.size_bytes < 0:",
        [
            "tests/stores/test_bounded_reads.py::test_a_reference_beyond_the_ceiling_is_refused_before_the_read"
        ],
    ),
    Mutant(
        "commit/cleaning.py",
        "if now_s - time_s >= min_age_s]",
        "if now_s >= time_s]",
        [f"{_UPKEEP}::test_attempts_that_never_committed_are_fenced_and_freed"],
    ),
    Mutant(
        "commit/cleaning.py",
        "freed = [save_id for save_id in dead if save_id not in commits]",
        "freed = list(dead)",
        [_UPKEEP, _COMMIT],
    ),
    Mutant(
        "commit/cleaning.py",
        "if named is None or save_id != named.save_id]",
        "if save_id]",
        [_UPKEEP],
    ),
    Mutant(
        "commit/assembly.py",
        "stored and len(stored) == len(tensor.boxes):",
        "stored:",
        ["tests/ranks/test_dcp_planners.py::test_shards_are_tied_where_all_that_hold_any_agree"],
    ),
    Mutant(
        "commit/assembly.py",
        "if missing or len(reports) != world_size:",
        "if missing:",
        ["tests/unit/test_assemble.py::test_reports_of_another_number_of_ranks_are_refused"],
    ),
    Mutant(
        "commit/report.py",
        "np.flatnonzero(self._codes[numbers] != codes)[:1]",
        "np.flatnonzero(self._codes[numbers] != codes)[:0]",
        ["tests/unit/test_assemble.py::test_what_is_wrong_is_said"],
    ),
]

_FORMAT_MUTANTS = [
    Mutant(
        "format/names.py",
        "if _DRIVE_OR_URL.match(path):",
        'if path == ":":',
        [f"{_LISTED}::test_an_unsafe_name_has_one"],
    ),
    Mutant(
        "format/names.py",
        'frozenset({"", ".", ".."})',
        'frozenset({"", ".."})',
        [f"{_LISTED}::test_an_unsafe_name_has_one"],
    ),
    Mutant(
        "format/names.py",
        "if _SCHEME.match(path) else None)",
        "if not path else None)",
        ["tests/format/test_named_files.py"],
    ),
    Mutant("format/safetensors.py", "if entry.start != end:", "if entry.start < end:", [_TENSORS]),
    Mutant(
        "format/safetensors.py",
        "if end != file_bytes - data_offset:",
        "if end > file_bytes - data_offset:",
        [_TENSORS],
    ),
    Mutant(
        "format/safetensors.py",
        "if end - start != prod(shape) * kind.item_bytes:",
        "if end - start < prod(shape) * kind.item_bytes:",
        [_TENSORS],
    ),
    Mutant(
        "format/documents.py",
        "if len(members) != len(pairs):",
        "if len(members) > len(pairs):",
        [_DOCUMENTS],
    ),
    Mutant(
        "format/fields.py",
        "or not inflater.eof or inflater.unused_data:",
        "or not inflater.eof:",
        [f"{_DOCUMENTS}::test_bytes_behind_a_packed_stream_are_refused"],
    ),
    Mutant(
        "format/fields.py",
        "if self.budget.remaining_bytes < 0:",
        "if size_bytes < 0:",
        [f"{_DOCUMENTS}::test_all_columns_of_a_document_share_one_limit"],
    ),
    Mutant(
        "format/inert_pickle.py",
        "if machine.metastack or machine.stack:",
        "if machine.metastack:",
        [f"{_HOSTILE}::test_a_pickle_that_torch_would_not_write_is_not_inert"],
    ),
    Mutant(
        "format/inert_pickle.py",
        "if len(self.metastack) >= _MAX_MARKS:",
        "if len(self.metastack) < 0:",
        [f"{_HOSTILE}::test_a_pickle_that_torch_would_not_write_is_not_inert"],
    ),
    Mutant(
        "format/inert_pickle.py",
        "(str(name), False, True)) if _NUMBER.fullmatch(name):",
        "(str(name), False, True)) if name:",
        [f"{_HOSTILE}::test_everything_else_is_refused"],
    ),
    Mutant(
        "format/inert_pickle.py",
        "target.state is not None or state is None:",
        "state is None:",
        [f"{_HOSTILE}::test_a_pickle_that_torch_would_not_write_is_not_inert"],
    ),
    Mutant(
        "format/commit_record.py",
        "if not all(map(is_save_id, record.fenced)):",
        "if not all(record.fenced):",
        [f"{_DAMAGED}::test_a_record_cannot_make_a_deletion_leave_the_checkpoint"],
    ),
    Mutant(
        "format/commit_record.py",
        "record.previous and record.previous.slot >= slot",
        "record.previous and record.previous.slot > slot",
        [f"{_DAMAGED}::test_a_document_that_cannot_be_is_refused"],
    ),
    Mutant(
        "format/commit_record.py",
        'if get.count("slot") != slot:',
        'if get.count("slot") < 0:',
        ["tests/api/test_damage_files.py::test_exchanged_commit_records_are_found"],
    ),
    Mutant(
        "format/rank_manifest.py",
        "good &= (stop <= np.uint64(size_bytes)) & (",
        "good &= (",
        [f"{_MANIFESTS}::test_an_item_that_ends_behind_its_file_is_refused"],
    ),
    Mutant(
        "format/rank_manifest.py",
        "good = (before <= start) & (start <= payload)",
        "good = (start <= payload)",
        [f"{_MANIFESTS}::test_items_that_overlap_are_refused"],
    ),
]

_SOURCE_MUTANTS = [
    Mutant(
        "source/file_versions.py",
        "if now[path] != self.of[path]:",
        "if now[path][0] != self.of[path][0]:",
        [f"{_OPENED}::test_files_that_another_writer_replaced_are_noticed"],
    ),
    Mutant(
        "source/model.py",
        "if document.save_id != save_id:",
        "if not document.save_id:",
        [f"{_DAMAGED}::test_a_rank_manifest_of_another_save_is_refused"],
    ),
    Mutant(
        "source/model.py",
        "if actual != expected or listed != box:",
        "if actual != expected:",
        [f"{_DAMAGED}::test_a_chunk_of_another_shape_is_refused"],
    ),
    Mutant(
        "source/model.py",
        "if head is not None and head.save_id == save_id:",
        "if head is not None:",
        [_OVERWRITE],
    ),
    Mutant(
        "source/foreign.py",
        "boxes, flaw = tiles_of(tensor.boxes, tensor.shape)",
        "boxes, flaw = tiles_of(tensor.boxes, tensor.shape)[0], None",
        [f"{_HOSTILE}::test_a_stock_checkpoint_with_a_gap_is_refused"],
    ),
    Mutant(
        "source/foreign.py",
        "if parsed.shape != place.sizes:",
        "if len(parsed.shape) != len(place.sizes):",
        [_HOSTILE],
    ),
    Mutant(
        "source/opening.py",
        'if local is not None and f"{SAVES}/" not in names:',
        "if local is not None:",
        [
            "tests/api/test_dcp_bad_input.py::test_a_save_beside_the_metadata_of_single_ranks_is_still_running"
        ],
    ),
    Mutant(
        "source/opening.py",
        "            if not attempts_left:",
        "            if attempts_left:",
        [_OVERWRITE, _REPLACED],
    ),
]

_SAVES_MUTANTS = [
    Mutant(
        "saves/outcome.py",
        'cause in {"interrupt", "unexpected"}:',
        'cause == "interrupt":',
        ["tests/unit/test_save_outcome.py"],
    ),
    Mutant(
        "saves/outcome.py",
        'if storage == "committed" else',
        'if storage == "absent" else',
        ["tests/unit/test_save_outcome.py"],
    ),
    Mutant(
        "saves/base.py",
        "return digest.digest() == file.hash_of(at)",
        "return digest.digest() != b''",
        [f"{_REUSE}::test_a_value_that_changes_leaves_the_stable_file_for_good"],
    ),
    Mutant(
        "saves/base.py",
        "(dtype, file.payload_bytes[at]) == (item.dtype, item.payload_bytes)",
        "file.payload_bytes[at] == item.payload_bytes",
        [f"{_REUSE}::test_equal_names_are_not_enough"],
    ),
    Mutant(
        "saves/base.py",
        "if error.kind not in _COPY_FAILURES:",
        "if error.kind not in COPY_REFUSALS:",
        [f"{_REUSE}::test_a_damaged_file_is_not_linked"],
    ),
    Mutant(
        "saves/base.py",
        "return self.manifest.save_id in OWN_SAVES",
        "return bool(self.manifest.save_id)",
        [f"{_REUSE}::test_a_process_that_goes_on_with_a_run_hashes_again"],
    ),
    Mutant(
        "saves/reuse.py",
        "full_every or _RETRY_AT",
        "full_every or 1000",
        [f"{_REUSE}::test_what_stays_later_is_noticed_without_full_every"],
    ),
    Mutant(
        "saves/reuse.py",
        "age >= self._full_every:",
        "age > self._full_every:",
        [f"{_REUSE}::test_a_file_is_written_anew_once_so_many_checkpoints_have_it"],
    ),
    Mutant(
        "saves/reuse.py",
        "changed.add(key)",
        "pass",
        [f"{_REUSE}::test_a_value_that_changes_leaves_the_stable_file_for_good"],
    ),
    Mutant(
        "saves/reuse.py",
        "unique <= equal",
        "unique & equal",
        [f"{_REUSE}::test_a_value_that_is_gone_is_in_no_file"],
    ),
    Mutant(
        "saves/reuse.py",
        "and not is_worth(staying - reused)",
        "and staying == reused",
        [f"{_REUSE}::test_a_small_value_that_joins_does_not_make_the_others_written"],
    ),
    Mutant(
        "saves/reuse.py",
        "return 0 if has_linked else self._count + 1",
        "return 0",
        [f"{_REUSE}::test_a_run_of_which_nothing_stays_is_hashed_three_times"],
    ),
    Mutant(
        "saves/shardfile.py",
        "if actual_length != length:",
        "if actual_length < length:",
        [f"{_WRITER}::test_an_item_of_another_length_is_an_error"],
    ),
    Mutant(
        "saves/shardfile.py",
        "_ZEROS[-self.position % PAYLOAD_ALIGN_BYTES]",
        "_ZEROS[0]",
        [f"{_MANIFESTS}::test_payloads_begin_at_multiples_of_64_bytes"],
    ),
    Mutant(
        "saves/items.py",
        "and not (tensor.is_conj() or tensor.is_neg())",
        "and not tensor.is_conj()",
        [f"{_REFUSED}::test_what_torch_has_yet_to_compute_is_saved_computed"],
    ),
    Mutant(
        "saves/session.py",
        'if error.kind != "no-space" or not self._has_freed(ticket, deadline):',
        "if error.kind:",
        ["tests/api/test_full_disk.py::test_a_save_without_space_frees_what_a_dead_one_left"],
    ),
    Mutant(
        "saves/session.py",
        'if self.options.unsafe_values == "refuse":',
        'if self.options.unsafe_values == "never":',
        [f"{_REFUSED}::test_a_value_that_only_pickle_holds_is_named"],
    ),
    Mutant(
        "saves/session.py",
        "self.discard(ticket.save_id, is_whole=True)",
        "self.discard(ticket.save_id, is_whole=False)",
        [
            "tests/api/test_requests.py::test_a_commit_that_the_storage_refuses_leaves_nothing",
        ],
    ),
]

_COORDINATION_MUTANTS = [
    Mutant("coordination/identity.py", "lowest = min(stepped", "lowest = max(stepped", [_IDENTITY]),
    Mutant(
        "coordination/identity.py",
        "and (self.step == other.step or None in (self.step, other.step))",
        "and self.step == other.step",
        [_IDENTITY],
    ),
    Mutant(
        "coordination/identity.py",
        "if identity in left_behind and before.get(rank) != identity:",
        "if identity in left_behind:",
        [f"{_IDENTITY}::test_a_rank_that_repeats_its_own_operation_is_not_behind"],
    ),
    Mutant(
        "coordination/rounds.py",
        "self._keys.set_polled(self.arrival_key, payload, timeout_s)",
        "self._keys.set(self.arrival_key, payload, timeout_s)",
        [f"{_ROUNDS}::test_each_request_of_a_save_may_be_lost_once"],
    ),
    Mutant(
        "coordination/rounds.py",
        "return self._set_verdict(_COORDINATOR, timeout_s)",
        "return _unpacked(self._keys.set_first(self._verdict_key, _COORDINATOR, timeout_s))",
        [
            f"{_ROUNDS}::test_a_failure_that_only_the_claim_reads_reaches_all_ranks_before_the_deadline"
        ],
    ),
    Mutant(
        "coordination/operation_rounds.py",
        "isinstance(release.error, PhaseTimeoutError)",
        "not isinstance(release.error, PhaseTimeoutError)",
        [f"{_ROUNDS}::test_a_choice_that_one_rank_began_alone_fails_no_choice_of_all"],
    ),
    Mutant(
        "coordination/keyvalue.py",
        "return keys[at:]",
        "return keys if at < len(names) else []",
        [f"{_ROUNDS}::test_a_poll_begins_at_the_first_request_with_a_missing_key"],
    ),
    Mutant(
        "coordination/operation_rounds.py",
        "(now_s - begin_s) / 20)",
        "0.0)",
        [f"{_ROUNDS}::test_the_coordinator_polls_with_growing_pauses"],
    ),
    Mutant(
        "coordination/heartbeats.py",
        "if number < self.number:",
        "if number <= self.number:",
        [f"{_ROUNDS}::test_the_worker_keeps_a_silent_trainer_alive"],
    ),
    Mutant(
        "coordination/heartbeats.py",
        "idle_s=slowest.idle_s + own.heard_s - slowest.heard_s)",
        "idle_s=slowest.idle_s)",
        [f"{_HANDLE}::test_a_rank_that_is_silent_makes_no_progress_by_hearsay"],
    ),
    Mutant(
        "coordination/failures.py",
        "is_general = is_decision or not",
        "is_general = not",
        [
            "tests/protocol/test_coordination.py::test_what_is_wrong_with_the_checkpoint_is_raised_as_it_is_by_all"
        ],
    ),
]

_DCP_MUTANTS = [
    Mutant(
        "dcp/border.py",
        "pickle.loads(pickle.dumps(error))",
        "pickle.dumps(error)",
        ["tests/api/test_dcp_bad_input.py"],
    ),
    Mutant(
        "dcp/writer.py",
        'if not kwargs.get("use_collectives", True):',
        'if kwargs.get("use_collectives") == 0.5:',
        ["tests/api/test_dcp_bad_input.py::test_a_save_without_collectives_is_refused"],
    ),
    Mutant(
        "dcp/writer.py",
        "            state.pending = None\n",
        "            state.is_reset_consumed = True\n",
        [
            "tests/api/test_dcp_bad_input.py::test_a_save_that_failed_early_leaves_no_place_for_the_next"
        ],
    ),
]

_LOADS_MUTANTS = [
    Mutant(
        "loads/items.py",
        "if not _is_filled(value)), None)",
        "if not value), None)",
        [f"{_REFUSED}::test_one_target_for_two_values_needs_consent"],
    ),
    Mutant("loads/items.py", "            or tensor.is_neg()\n", "", [_REFUSED]),
    Mutant(
        "loads/items.py",
        "with torch.inference_mode(self.tensor.is_inference()):",
        "with torch.inference_mode(False):",
        [f"{_REFUSED}::test_targets_of_inference_mode_are_filled"],
    ),
    Mutant(
        "loads/states.py",
        "is getattr(base, n) and n not in own for n in names)",
        "is getattr(base, n) for n in names)",
        [_REFUSED],
    ),
]

_INTEGRATIONS_MUTANTS = [
    Mutant(
        "integrations/packing.py",
        "if head == OUTLINE or is_taken(head) else head",
        "if head == OUTLINE else head",
        ["tests/api/test_integration_packing.py"],
    ),
    Mutant(
        "integrations/packing.py",
        "while name in tensors:",
        "while not name:",
        ["tests/api/test_integration_packing.py"],
    ),
    Mutant(
        "integrations/packing.py",
        "if fqn in known or not self._wanted(fqn):",
        "if fqn in known:",
        ["tests/api/test_integration_packing.py"],
    ),
]

_OPTIONS_MUTANTS = [
    Mutant(
        "errors.py",
        '{**vars(self), "args": self.args}',
        "{**vars(self)}",
        ["tests/unit/test_public_surface.py::test_an_error_survives_every_copy"],
    ),
    Mutant(
        "options.py",
        "rank_count = max(1, int(local_size))",
        "rank_count = int(local_size)",
        [f"{_TRANSFER}::test_ranks_of_a_node_share_what_is_the_default"],
    ),
    Mutant(
        "options.py",
        '0 < value < float("inf")',
        '0 <= value < float("inf")',
        ["tests/api/test_dcp_bad_input.py"],
    ),
    Mutant(
        "options.py",
        "if self.memory_limit_bytes < self.part_bytes:",
        "if self.memory_limit_bytes < 0:",
        ["tests/api/test_dcp_bad_input.py"],
    ),
]

_EXPORT_MUTANTS = [
    Mutant(
        "export/output.py",
        "or not has_checksum(ranges, file, lambda _: advanced()):",
        "or file is None:",
        [f"{_FLIPPED}::test_nothing_is_made_of_an_export_with_a_damaged_file"],
    ),
    Mutant(
        "export/output.py",
        "self.source.check_unchanged(self.context.source)",
        "_ = self.source.check_unchanged",
        [_REPLACED],
    ),
    Mutant(
        "export/torchfile.py",
        "        return set(self.versions.of)\n",
        "        return set()\n",
        [_REPLACED],
    ),
    Mutant(
        "export/copy_foreign.py",
        "    foreign_copy.source.versions = source.versions\n",
        "",
        [_REPLACED],
    ),
    Mutant(
        "export/folder.py",
        "        self.check_held()\n        if self.last:",
        "        if self.last:",
        [_OVERTAKEN],
    ),
    Mutant(
        "export/folder.py",
        "plan, store = self.plan, self.context.target\n        self.check_held()",
        "plan, store = self.plan, self.context.target",
        [_OVERTAKEN],
    ),
    Mutant(
        "export/write.py",
        "        self._export.check_held()\n        self._export.prepare_names()",
        "        self._export.prepare_names()",
        [_OVERTAKEN],
    ),
    Mutant(
        "export/write.py",
        "                self._export.check_held()\n                upload.complete",
        "                upload.complete",
        [_OVERTAKEN],
    ),
    Mutant(
        "export/write.py",
        "self._export.check_unchanged()",
        "_ = self._export.check_unchanged",
        [_REPLACED],
    ),
    Mutant(
        "export/removal.py",
        "if now is None or now.run_id != run_id:",
        "if now is None:",
        [
            "tests/faults/test_prune_attack.py::test_an_export_that_begins_while_one_is_removed_stays"
        ],
    ),
    Mutant(
        "export/folder.py",
        "not (is_resumed or is_remains or self.spec.overwrite):",
        "not (is_resumed or self.spec.overwrite):",
        ["tests/api/test_convert_failures.py::test_another_conversion_keeps_nothing"],
    ),
    Mutant(
        "export/torchfile.py", "if size_bytes > info.file_size:", "if size_bytes < 0:", [_BOUNDS]
    ),
    Mutant(
        "export/torchfile.py",
        "or info.file_size != info.compress_size:",
        "or info.file_size < 0:",
        [_BOUNDS],
    ),
    Mutant(
        "export/torchfile.py",
        "if crc != record.crc32:",
        "if crc < 0:",
        [f"{_CONVERT}::test_every_flipped_bit_of_a_torch_file_is_found"],
    ),
    Mutant(
        "export/torchfile.py",
        "if is_strided and not tensor.is_contiguous():",
        "if not is_strided:",
        [_CONVERT],
    ),
    Mutant(
        "export/torchsave.py",
        "            self.check_unchanged()\n",
        "            _ = self.check_unchanged\n",
        [f"{_REPLACED}::test_a_torch_file_of_two_saves_is_not_written"],
    ),
    Mutant(
        "export/select.py",
        "if key is None or (depth and not _MODEL.fullmatch(key)):",
        "if key is None:",
        [_CONSOLIDATION],
    ),
    Mutant("export/select.py", "if len(models) != 1:", "if not models:", [_CONSOLIDATION]),
    Mutant(
        "export/select.py",
        "if None not in crcs and crcs[: len(boxes)] != crcs[len(boxes) :]:",
        "if None in crcs:",
        [_CONSOLIDATION],
    ),
    Mutant(
        "export/copy_committed.py",
        "while save_id != head_id and save_id in named:",
        "while save_id is None:",
        [f"{_COPY}::test_an_id_that_the_target_gave_up_is_never_used_again"],
    ),
    Mutant(
        "export/copy_foreign.py",
        "elif head not in _PROTECTED and head.casefold() in _FOLDED:",
        "elif head in _PROTECTED and head.casefold() not in _FOLDED:",
        ["tests/api/test_hostile_names.py"],
    ),
    Mutant(
        "export/copy_foreign.py",
        "if size_bytes is None or size_bytes < end:",
        "if size_bytes is None:",
        [f"{_COPY}::test_a_stock_checkpoint_whose_files_come_short_is_found"],
    ),
    Mutant(
        "export/options.py",
        "startswith(f\"{spelt(outer).rstrip('/')}/\")",
        "startswith(spelt(outer).rstrip('/'))",
        [_COPY],
    ),
    Mutant(
        "export/consolidate.py",
        'if target.url == source.url or f"{target.url}/".startswith(own):',
        "if target.url == source.url:",
        [f"{_ALONE}::test_what_can_be_no_output_is_refused"],
    ),
    Mutant(
        "export/folder.py",
        "if self._needs_guard or GUARD_NAME in here:",
        "if self._needs_guard:",
        [f"{_OVERTAKEN}::test_the_guard_of_a_removal_does_not_outlive_an_export"],
    ),
    Mutant(
        "export/folder.py",
        "            store.delete(sorted(indexes.intersection(here)))\n",
        "",
        ["tests/api/test_export_files.py"],
    ),
    Mutant(
        "export/write.py",
        "                self._mismatches.append((region, mismatch))\n        self._make_again()\n",
        "                raise mismatch from None\n",
        [f"{_FLIPPED}::test_ranks_read_a_wrong_byte_of_a_shared_file_again"],
    ),
    Mutant(
        "export/write.py",
        "        if crc32c != file.crc32c:\n",
        "        if crc32c is None:\n",
        [f"{_COPY_PART}::test_a_wrong_copy_of_the_storage_is_read_and_sent"],
    ),
    Mutant(
        "export/copy_foreign.py",
        "or crc32c not in {None, crc32c_of(data)}:",
        "or crc32c == -1:",
        [f"{_FLIPPED}::test_a_copy_of_an_export_by_its_own_url_reads_a_wrong_byte_again"],
    ),
    Mutant(
        "export/torchfile.py",
        "partial(self._check_anew, key)",
        "partial(self._check, key)",
        [f"{_FLIPPED}::test_a_conversion_of_a_torch_file_reads_a_wrong_byte_again"],
    ),
    Mutant(
        "export/torchfile.py",
        "replace(place, crcs=crcs, block_bytes=DEFAULT_BLOCK_BYTES)",
        "place",
        [f"{_FLIPPED}::test_a_conversion_of_a_torch_file_reads_a_wrong_byte_again"],
    ),
    Mutant(
        "export/folder.py",
        "            old |= here & {seal.file.path for seal in seals if seal}\n",
        "",
        [f"{_COPY}::test_files_of_an_unfinished_copy_do_not_stay_beside_another"],
    ),
    Mutant(
        "export/copy_foreign.py",
        "if any(map(exports.is_of_export, documents)):",
        "if not documents and entries == {}:",
        [f"{_FLIPPED}::test_a_copy_of_an_export_by_its_own_url_refuses_a_damaged_file"],
    ),
    Mutant(
        "export/reads.py",
        "if needed > limit:",
        "if needed < 0:",
        [f"{_CONVERT}::test_a_strided_tensor_counts_as_often_as_it_is_held"],
    ),
    Mutant(
        "export/layout.py",
        "if pattern == ADAPTER_PATTERN and len(groups) > 1:",
        "if len(groups) < 0:",
        ["tests/api/test_export_files.py"],
    ),
]

_CASTS_MUTANTS = [
    Mutant("loads/casts.py", 'if self._casts == "exact":', 'if self._casts == "never":', [_CASTS]),
    Mutant(
        "loads/casts.py",
        "if stored.is_complex and not target.is_complex:",
        "if stored.is_complex and target.is_complex:",
        [_CASTS],
    ),
    Mutant("loads/casts.py", "        and wide.step <= narrow.step\n", "", [_CASTS]),
    Mutant(
        "loads/casts.py", "if changes.unfit is not None:", "if changes.unfit is changes:", [_CASTS]
    ),
]

MUTANTS: list[Mutant] = [
    *_MANAGER_MUTANTS,
    *_CLI_MUTANTS,
    *_INSPECT_MUTANTS,
    *_BACKGROUND_MUTANTS,
    *_STORE_MUTANTS,
    *_TRANSFER_MUTANTS,
    *_COMMIT_MUTANTS,
    *_FORMAT_MUTANTS,
    *_SOURCE_MUTANTS,
    *_SAVES_MUTANTS,
    *_COORDINATION_MUTANTS,
    *_DCP_MUTANTS,
    *_LOADS_MUTANTS,
    *_INTEGRATIONS_MUTANTS,
    *_OPTIONS_MUTANTS,
    *_EXPORT_MUTANTS,
    *_CASTS_MUTANTS,
]
