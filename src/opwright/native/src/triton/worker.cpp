#include "worker.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <new>
#include <set>
#include <stdexcept>
#include <vector>

#include "opwright/triton/error.h"

extern char** environ;

namespace opwright::triton::detail {

std::mutex workers_mutex;

namespace {

// The current folder is not searched: a json.py there is not the worker's.
constexpr char kProgram[] =
    "import sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)]; import worker; "
    "worker.main()";

class Worker {
 public:
  Worker(const std::string& python, const std::string& folder) {
    // A fork while the pipes are made would leave the child with the worker's ends of them.
    const std::lock_guard lock(workers_mutex);
    int to[2], from[2];
    if (pipe2(to, O_CLOEXEC) != 0) throw std::runtime_error(std::strerror(errno));
    if (pipe2(from, O_CLOEXEC) != 0) {
      const int code = errno;
      close(to[0]);
      close(to[1]);
      throw std::runtime_error(std::strerror(code));
    }
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, to[0], 0);
    posix_spawn_file_actions_adddup2(&actions, from[1], 1);
    std::vector<char*> arguments;
    for (const std::string& text : {python, std::string("-c"), std::string(kProgram), folder}) {
      arguments.push_back(strdup(text.c_str()));
    }
    arguments.push_back(nullptr);
    const int failed =
        posix_spawnp(&pid_, python.c_str(), &actions, nullptr, arguments.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    for (char* argument : arguments) free(argument);
    close(to[0]);
    close(from[1]);
    write_ = to[1];
    read_ = from[0];
    if (failed) {
      close(write_);
      close(read_);
      throw std::runtime_error(std::strerror(failed));
    }
    all().insert(this);
  }

  ~Worker() {
    {
      const std::lock_guard lock(workers_mutex);
      all().erase(this);
      close_pipes();
    }
    if (has_ended_) return;  // its number may be another process's by now
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Worker(const Worker&) = delete;

  // Those of this process, idle and busy; under workers_mutex.
  static std::set<Worker*>& all() {
    static auto* all = new std::set<Worker*>;
    return *all;
  }

  void close_pipes() {
    close(write_);
    close(read_);
  }

  // Throws std::runtime_error if the worker dies, is too slow or sends no JSON.
  Json ask(const std::string& request, int timeout_s) {
    const std::string line = "{\"id\": " + std::to_string(++id_) + ", " + request + "}\n";
    send(line);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(timeout_s);
    while (true) {
      const size_t end = received_.find('\n');
      if (end != std::string::npos) {
        const Json reply = parse_json(std::string_view(received_).substr(0, end));
        received_.erase(0, end + 1);
        if (reply["id"].type != Json::Type::kInt || reply["id"].integer != id_) {
          throw std::runtime_error("it answered another request");
        }
        return reply;
      }
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - std::chrono::steady_clock::now());
      pollfd waiting = {read_, POLLIN, 0};
      const int ready = left.count() <= 0 ? 0 : poll(&waiting, 1, static_cast<int>(left.count()));
      if (ready < 0 && errno == EINTR) continue;
      if (ready == 0)
        throw std::runtime_error("it did not answer within " + std::to_string(timeout_s) + " s");
      char buffer[65536];
      const ssize_t count = ready < 0 ? -1 : read(read_, buffer, sizeof buffer);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) throw std::runtime_error(how_it_died());
      received_.append(buffer, static_cast<size_t>(count));
    }
  }

 private:
  void send(const std::string& line) {
    // SIGPIPE would kill the process when the worker is gone: it is held back in this thread.
    sigset_t pipe_signal, before, pending;
    sigemptyset(&pipe_signal);
    sigaddset(&pipe_signal, SIGPIPE);
    sigpending(&pending);
    pthread_sigmask(SIG_BLOCK, &pipe_signal, &before);
    size_t sent = 0;
    int failed = 0;
    while (sent < line.size() && !failed) {
      const ssize_t count = write(write_, line.data() + sent, line.size() - sent);
      if (count >= 0) {
        sent += static_cast<size_t>(count);
      } else if (errno != EINTR) {
        failed = errno;
      }
    }
    if (failed == EPIPE && !sigismember(&pending, SIGPIPE)) {
      const timespec now = {};
      sigtimedwait(&pipe_signal, nullptr, &now);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (failed) throw std::runtime_error(how_it_died());
  }

  std::string how_it_died() {
    int status = 0;
    for (int i = 0; i < 100; ++i) {
      const pid_t ended = waitpid(pid_, &status, WNOHANG);
      has_ended_ =
          ended == pid_ || (ended < 0 && errno == ECHILD);  // the program may reap all children
      if (ended == pid_) {
        if (WIFSIGNALED(status))
          return std::string("it was killed by signal ") + std::to_string(WTERMSIG(status));
        return "it ended with status " + std::to_string(WEXITSTATUS(status));
      }
      usleep(10000);
    }
    return "it closed its output";
  }

  pid_t pid_ = 0;
  bool has_ended_ = false;
  int write_ = -1, read_ = -1;
  int64_t id_ = 0;
  std::string received_;
};

// The workers that wait for work, and how many have some; under workers_mutex.
struct Pool {
  std::condition_variable freed;
  std::vector<std::pair<std::string, std::unique_ptr<Worker>>> idle;  // by Python
  int busy = 0;
};

Pool& pool() {
  static Pool* pool = new Pool;  // never destroyed: threads may still compile at exit
  return *pool;
}

// Runs when the library is loaded, before any thread can hold the guards of these statics, which no
// child of fork could release.
[[maybe_unused]] const bool are_made = (pool(), Worker::all(), true);

std::unique_ptr<Worker> take(const ProcessSettings& settings) {
  Pool& workers = pool();
  std::unique_lock lock(workers_mutex);
  workers.freed.wait(lock, [&] { return workers.busy < settings.workers; });
  ++workers.busy;
  for (auto it = workers.idle.begin(); it != workers.idle.end(); ++it) {
    if (it->first != settings.python) continue;
    std::unique_ptr<Worker> worker = std::move(it->second);
    workers.idle.erase(it);
    return worker;
  }
  return nullptr;
}

void give_back(const ProcessSettings& settings, std::unique_ptr<Worker> worker) {
  Pool& workers = pool();
  const std::lock_guard lock(workers_mutex);
  --workers.busy;
  if (worker) workers.idle.emplace_back(settings.python, std::move(worker));
  workers.freed.notify_one();
}

Json ask_process(const ProcessSettings& settings, const std::string& request,
                 const std::string& subject) {
  std::unique_ptr<Worker> worker = take(settings);
  std::string why;
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      if (!worker) worker = std::make_unique<Worker>(settings.python, settings.worker);
      Json reply = worker->ask(request, settings.timeout_s);
      give_back(settings, std::move(worker));
      return reply;
    } catch (const std::exception& error) {
      why = error.what();
      worker.reset();
    }
  }
  give_back(settings, nullptr);
  throw Error(Cause::kWorker, subject + ": the compile worker failed twice: " + why +
                                  "\n\n  python  " + settings.python + "\n  worker  " +
                                  settings.worker +
                                  "\n\nhint: name a Python that has Triton 3.5 to 3.9: "
                                  "OPWRIGHT_TRITON=python=/path/to/venv/bin/python");
}

Json ask_host(Compiler compiler, const std::string& request, const std::string& subject) {
  if (const char* reply = compiler(("{\"id\": 0, " + request + "}").c_str()))
    return parse_json(reply);
  // Ctrl-C, whose exception could not leave the callback. The host's handler gets the signal again
  // and acts once the launch has returned.
  struct sigaction handler;
  if (sigaction(SIGINT, nullptr, &handler) == 0 && handler.sa_handler != SIG_DFL) raise(SIGINT);
  throw Error(Cause::kInterrupted, subject + ": its compile was interrupted");
}

}  // namespace

void forget_workers() {
  Pool& workers = pool();
  for (Worker* worker : Worker::all()) worker->close_pipes();
  Worker::all().clear();
  for (auto& idle : workers.idle) idle.second.release();  // its end is the parent's
  workers.idle.clear();
  workers.busy = 0;
  new (&workers.freed) std::condition_variable;  // the old one counts threads that are not here
}

Json ask_worker(const ProcessSettings& settings, const std::string& request,
                const std::string& subject) {
  const Json reply = settings.compiler ? ask_host(settings.compiler, request, subject)
                                       : ask_process(settings, request, subject);
  if (!reply["ok"].is_null()) return reply["ok"];
  const Json& error = reply["error"];
  if (error["message"].text.empty()) {
    throw Error(
        Cause::kWorker,
        subject + ": the compile worker answered with neither a result nor an error\n\n  python  " +
            settings.python + "\n  worker  " + settings.worker +
            "\n\nhint: name a Python that has Triton 3.5 to 3.9: "
            "OPWRIGHT_TRITON=python=/path/to/venv/bin/python");
  }
  std::string text = subject + ": " + error["message"].text;
  if (!error["file"].text.empty()) {
    text += "\n\n  " + error["file"].text;
    if (error["line"].integer > 0) text += ":" + std::to_string(error["line"].integer);
    if (!error["source"].text.empty()) text += "\n    " + error["source"].text;
  }
  if (!error["hint"].text.empty()) text += "\n\nhint: " + error["hint"].text;
  const std::string& kind = error["kind"].text;
  const Cause cause =
      kind == "argument" || kind == "option"    ? Cause::kArgument
      : kind == "compile" || kind == "contract" ? Cause::kCompile
      : kind == "request" || kind == "no-triton" || kind == "internal" || kind == "output"
          ? Cause::kWorker
          : Cause::kKernelFile;
  throw Error(cause, text);
}

}  // namespace opwright::triton::detail
