#include "tesserae/shard/flat.h"
#include <gtest/gtest.h>
