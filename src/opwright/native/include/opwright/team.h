// A team of PyTorch's own threads that work at the same time, for kernels whose steps depend on
// each other: a recurrence splits a step among the members and waits for all before the next.
//
//   opwright::team(opwright::num_threads(), [&](const opwright::Member& member) {
//     for (int64_t t = 0; t < steps; ++t) {
//       for (int64_t i = member.id(); i < n; i += member.count()) ...
//       member.barrier();
//     }
//   });
//
// A parallel loop promises neither how many threads it gets nor that its chunks run at once. So a
// team is whoever came: the first to come keeps the door, waits until all chunks are there or
// kTeamWaitNs have passed, and closes it; who comes later does nothing. Nobody waits for a thread
// that may not run: within another parallel loop, or with one thread, a team is one member.
#pragma once

#include <sched.h>
#include <time.h>

#include "opwright/parallel.h"

namespace opwright {

// What a team waits for members that are still to come. Threads that have just worked come within
// 1 us; those that sleep, in 50 to 100 us (2-core Xeon, Sapphire Rapids class, a virtual machine).
inline constexpr int64_t kTeamWaitNs = 200'000;

// How often a waiting thread looks before it lets others run. A look takes 12 ns there, so this is
// 50 us: more than balanced members differ by, and nothing beside a slice of the scheduler.
inline constexpr int kMostLooks = 4096;
inline constexpr int kLeastLooks = 16;

// Up to so many members watch the word that they all write, at a barrier: with 2 it takes 0.10 us
// in place of 0.30, with 4 0.50 in place of 0.54, but with 8 1.2 in place of 0.79 (16-core Xeon).
inline constexpr int kFewMembers = 4;

namespace detail {

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}

// Each word that threads wait on has a cache line of its own.
struct Team {
  // Chunks come with a number of steps: when all steps are covered, nobody else can come.
  static constexpr uint64_t kClosed = uint64_t{1} << 63, kMember = uint64_t{1} << 32;
  alignas(64) uint64_t roll = 0;     // kClosed | members * kMember | steps covered
  alignas(64) uint64_t tickets = 0;  // drawn at barriers: the last of a round opens it
  alignas(64) uint64_t rounds = 0;   // barriers that are open
  alignas(64) int ended = 0;         // kLeft | kFailed
  Failure failure;
  static constexpr int kLeft = 1, kFailed = 2;

  int count() const {
    return static_cast<int>((__atomic_load_n(&roll, __ATOMIC_RELAXED) & ~kClosed) / kMember);
  }

  // Returns the place of a new member, -1 when the door is closed.
  int enter(int64_t covered, int64_t all) {
    uint64_t before = __atomic_load_n(&roll, __ATOMIC_RELAXED), after;
    do {
      if (before & kClosed) return -1;
      after = before + kMember + static_cast<uint64_t>(covered);
      if (static_cast<int64_t>(after % kMember) == all) after |= kClosed;
    } while (!__atomic_compare_exchange_n(&roll, &before, after, false, __ATOMIC_ACQ_REL,
                                          __ATOMIC_RELAXED));
    const int id = static_cast<int>(before / kMember);
    const int64_t since = after & kClosed ? 0 : now_ns();
    for (int looks = 0; !(__atomic_load_n(&roll, __ATOMIC_ACQUIRE) & kClosed); ++looks) {
      pause();
      if (looks % 16 == 15 && id == 0 && now_ns() - since > kTeamWaitNs) {
        __atomic_fetch_or(&roll, kClosed, __ATOMIC_ACQ_REL);
      } else if (looks > kMostLooks) {
        sched_yield();
      }
    }
    return id;
  }

  // Waits until all members have drawn a ticket. Throws when one cannot come any more.
  void barrier(int members, int& looks) {
    const uint64_t all = static_cast<uint64_t>(members);
    const uint64_t ticket = __atomic_fetch_add(&tickets, 1, __ATOMIC_ACQ_REL);
    const uint64_t round = ticket / all + 1;
    // Many that watch the tickets slow down who draws one: they watch a word that is written once.
    const bool is_few = members <= kFewMembers;
    const uint64_t* watched = is_few ? &tickets : &rounds;
    const uint64_t wanted = is_few ? round * all : round;
    if (ticket % all == all - 1) {
      if (!is_few) __atomic_store_n(&rounds, round, __ATOMIC_RELEASE);
      return;
    }
    auto is_open = [&] { return __atomic_load_n(watched, __ATOMIC_ACQUIRE) >= wanted; };
    int looked = 0;
    for (; !is_open(); ++looked) {
      pause();
      if (looked % 16 != 15) continue;
      if (const int why = __atomic_load_n(&ended, __ATOMIC_ACQUIRE); why && !is_open()) {
        throw Error(why & kFailed ? "a barrier was broken by an exception in another thread"
                                  : "a member of a team returned while others wait at a barrier");
      }
      if (looked > looks) sched_yield();
    }
    // Where members outnumber cores, looking only keeps the others from running.
    looks = looked > looks ? looks / 2 : looks * 2;
    looks = looks < kLeastLooks ? kLeastLooks : looks > kMostLooks ? kMostLooks : looks;
  }

  void leave() noexcept { __atomic_fetch_or(&ended, kLeft, __ATOMIC_ACQ_REL); }

  // Keeps the exception that is being handled.
  void fail() noexcept {
    if (failure.keep()) __atomic_fetch_or(&ended, kFailed, __ATOMIC_ACQ_REL);
  }
};

}  // namespace detail

// One of the threads of a team.
class Member {
 public:
  Member(detail::Team& team, int id) : team_(team), id_(id), count_(team.count()) {}

  int id() const { return id_; }        // 0 .. count() - 1
  int count() const { return count_; }  // the same for all members

  // Waits for all members; what each wrote before, all see after. Every member must call it equally
  // often. With 2 members: 0.07 us (2-core Xeon, Sapphire Rapids class).
  void barrier() const {
    if (count_ > 1) team_.barrier(count_, looks_);
  }

 private:
  detail::Team& team_;
  int id_, count_;
  mutable int looks_ = kMostLooks;
};

// Calls body(member) once on each of up to `threads` threads at the same time, and returns when all
// have returned. An exception in one breaks the barriers of the others and is thrown here as Error.
// An empty team of 2: 1.3 us, with 0.95 of the parallel loop (2-core Xeon, Sapphire Rapids class).
template <typename Body>
void team(int threads, const Body& body) {
  detail::Team team;
  const int64_t all = threads > 1 ? threads : 1;
  parallel_for(all, 1, [&](int64_t begin, int64_t end) {
    const int id = team.enter(end - begin, all);
    if (id < 0) return;
    const Member member(team, id);
    try {
      body(member);
      team.leave();
    } catch (...) {
      team.fail();
    }
  });
  team.failure.raise();
}

}  // namespace opwright
