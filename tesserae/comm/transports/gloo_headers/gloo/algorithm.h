#pragma once
// See gloo/context.h of this folder.
