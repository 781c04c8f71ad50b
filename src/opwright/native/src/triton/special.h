// The launches that need more than the hot path does.
#pragma once

#include "state.h"

namespace opwright::triton::detail {

// Appends the values of heuristics and of the autotune key to a call's words; returns their number.
uint32_t decorate(const Description& description, Call& call);

// Throws Error if it fails.
Value evaluate_heuristic(const Description& description, const Heuristic& heuristic,
                         const Expression::Lookup& lookup);

// Converted values, defaults, TMA descriptors, scratch memory, hooks, checks of pointers, many
// parameters.
void launch_special(const KernelState& kernel, const Entry& entry, Call& call, Stream stream,
                    Grid grid);

[[noreturn]] void refuse_grid(const KernelState& kernel, const Grid& grid);
[[noreturn]] void launch_failed(const KernelState& kernel, const Entry& entry,
                                const LaunchConfig& config, Result result);

}  // namespace opwright::triton::detail
