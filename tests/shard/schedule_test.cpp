#include "tesserae/shard/schedule.h"
#include <gtest/gtest.h>
