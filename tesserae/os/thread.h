#pragma once

namespace tesserae::os {

/// From now on the calling thread gets next to no processor while others want it (nice 19): for what serves visitors in
/// a process that trains. Does nothing where threads have no priority of their own.
void yield_to_others();

}  // namespace tesserae::os
