"""What verify and bench write down: typed, versioned, read back by the report.

Times are in microseconds, sizes in bytes, rates in GB/s (1e9 bytes per second).
"""

from opwright.records.bench import BenchRecord, Comparison, Conditions, Limits, Measurement, Summary, Timing
from opwright.records.build import BuildRecord, BuildStep, KernelUse
from opwright.records.call import CallPart, CallRecord
from opwright.records.files import Record, builtins_of, decoded, encodable, read, save, save_in
from opwright.records.machine import VERSION, Machine
from opwright.records.verify import CaseError, Check, Failure, Undecided, VerifyRecord
from opwright.records.versions import BaseRecord, BaseRow

__all__ = [
    "VERSION",
    "BaseRecord",
    "BaseRow",
    "BenchRecord",
    "BuildRecord",
    "BuildStep",
    "CallPart",
    "CallRecord",
    "CaseError",
    "Check",
    "Comparison",
    "Conditions",
    "Failure",
    "KernelUse",
    "Limits",
    "Machine",
    "Measurement",
    "Record",
    "Summary",
    "Timing",
    "Undecided",
    "VerifyRecord",
    "builtins_of",
    "decoded",
    "encodable",
    "read",
    "save",
    "save_in",
]
