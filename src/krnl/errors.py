"""What can go wrong, by whose hand it can be put right.

    KrnlError
    ├── ConfigError    a setting, flag or YAML key           (names the field)
    ├── DataError      training data                         (names file and line)
    ├── FormatError    a checkpoint or adapter               (names file and key)
    ├── PlanError      the work does not fit or is malformed (says by how much, and what to lower)
    ├── Refused        a machine too busy for a figure       (names what keeps it busy)
    ├── TrainingError  a run that diverged                   (names the update)
    └── BackendError   a device or a kernel failed           (names the dispatch)

Every message is one or more plain sentences: what happened, where, what to do. The command line
prints the message alone and exits with 2 (3 for Refused; 1 for the last two, which are nobody's
mistake); a traceback means a bug in KRNL."""


class KrnlError(Exception):
    """Base of every error that KRNL raises on purpose."""


class ConfigError(KrnlError):
    """A setting that cannot be used."""


class DataError(KrnlError):
    """Training data that cannot be read or holds nothing to learn."""


class FormatError(KrnlError):
    """A checkpoint, adapter or saved state that is damaged, incomplete or of another model."""


class PlanError(KrnlError):
    """A step that cannot be planned."""


class Refused(KrnlError):  # noqa: N818 (nothing went wrong)
    """A figure that would not be worth printing: the machine is not quiet."""


class TrainingError(KrnlError):
    """A run whose loss or gradient is no longer a finite number."""


class BackendError(KrnlError):
    """A device that failed."""
