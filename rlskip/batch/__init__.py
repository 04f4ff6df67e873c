"""What a batch can be: a TensorDict, a DataProto, a mapping of columns, a list of mappings.

:mod:`rlskip.batch.columns` splits any of them into columns and rows;
:mod:`rlskip.batch.rows` names rows by their tokens, and :mod:`rlskip.batch.row_parts` finds their
values;
:mod:`rlskip.batch.fields` has the names of fields, :mod:`rlskip.batch.prompts` the uids,
:mod:`rlskip.batch.meta` what a batch carries besides its rows, :mod:`rlskip.batch.tables` batches
without the classes of a host or of torch. None of them loads torch: where it is not loaded, no
value is a tensor.
"""
