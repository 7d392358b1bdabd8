// SPDX-License-Identifier: AGPL-3.0-only
// Stands in for the toolkit's header of this name: what kernels need of it is there already.
#pragma once
