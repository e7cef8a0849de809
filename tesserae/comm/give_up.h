#pragma once

#include "tesserae/comm/fabric.h"

namespace tesserae::comm {

/// After a verb threw a CommError, for a rank that goes on in another fabric, with other ranks: aborts what still
/// blocks here and returns when nothing runs on the lanes. What was computed with groups and lanes stays readable while
/// the fabric has owners; no verb is called afterwards. From the training thread; not collective.
void give_up(Fabric& fabric);

}  // namespace tesserae::comm
