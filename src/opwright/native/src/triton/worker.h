// The compile workers: Python processes that answer one JSON line each.
#pragma once

#include <mutex>
#include <string>

#include "json.h"
#include "process_settings.h"

namespace opwright::triton::detail {

extern std::mutex workers_mutex;  // held while a process is started, too
// In a child of fork, with that mutex held: closes the pipes of the parent's workers and forgets
// them.
void forget_workers();

// Sends a request ("do", "file", ... without the braces and the id) and returns the reply's "ok". A
// free worker is taken, or one more is started, or one is waited for. A worker that dies is
// replaced once. Throws Error: what the author must mend, or kWorker.
Json ask_worker(const ProcessSettings& settings, const std::string& request,
                const std::string& subject);

}  // namespace opwright::triton::detail
