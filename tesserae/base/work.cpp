#include "tesserae/base/work.h"

namespace tesserae {
namespace {

thread_local PerWork work_here{};

}  // namespace

void count_work(Work what, int64_t amount) {
  work_here[static_cast<size_t>(what)] += static_cast<uint64_t>(amount);
}

const PerWork& work_of_this_thread() {
  return work_here;
}

}  // namespace tesserae
