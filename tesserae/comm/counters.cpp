#include "tesserae/comm/counters.h"

#include <cstddef>
#include <initializer_list>

namespace tesserae::comm {

namespace {

template <class Self, class Function>
void for_each_verb(Self& counters, const Function& function) {
  for (auto* verb : {&counters.all_gather, &counters.reduce_scatter, &counters.all_reduce, &counters.broadcast,
                     &counters.exchange, &counters.barrier}) {
    function(*verb);
  }
}

}  // namespace

uint64_t Counters::calls() const {
  uint64_t sum = 0;
  for_each_verb(*this, [&](const Verb& verb) { sum += verb.calls; });
  return sum;
}

uint64_t Counters::bytes() const {
  uint64_t sum = 0;
  for_each_verb(*this, [&](const Verb& verb) { sum += verb.bytes; });
  return sum;
}

Counters& Counters::operator+=(const Counters& other) {
  const Verb* theirs[] = {&other.all_gather, &other.reduce_scatter, &other.all_reduce,
                          &other.broadcast,  &other.exchange,       &other.barrier};
  std::size_t next = 0;
  for_each_verb(*this, [&](Verb& verb) {
    verb.calls += theirs[next]->calls;
    verb.bytes += theirs[next]->bytes;
    ++next;
  });
  return *this;
}

}  // namespace tesserae::comm
