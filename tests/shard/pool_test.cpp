#include "tesserae/shard/pool.h"
#include <gtest/gtest.h>
