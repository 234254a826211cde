// Where the threads that a warp operation names meet.
#pragma once

#include "state.h"

namespace sim {

// Parks the calling lane until every lane of `mask` has arrived. The last to arrive runs `compute` on the lanes'
// payloads (null for lanes outside the mask), which lie on their parked stacks. Nothing but sync_warp orders memory.
void meet_in_warp(const char* where, const char* what, uint32_t mask, void* payload,
                  void (*compute)(void* const (&lanes)[warp_size]), bool orders_memory);

template <class Payload, void (*compute)(Payload* const (&)[warp_size])>
void meet(const char* where, const char* what, uint32_t mask, Payload& payload) {
  meet_in_warp(
      where, what, mask, &payload,
      [](void* const(&lanes)[warp_size]) {
        Payload* typed[warp_size];
        for (int i = 0; i < warp_size; ++i) typed[i] = static_cast<Payload*>(lanes[i]);
        compute(typed);
      },
      false);
}

// For operations that every lane of the warp executes.
uint32_t full_warp(const char* where, const char* what);

}  // namespace sim
