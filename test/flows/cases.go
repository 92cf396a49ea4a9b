package flows

import "slices"

// Cases are all cases that every dataplane must pass.
func Cases() []Case {
	return slices.Concat(
		matrixCases(), clusterIPCases(), nodePortCases(), externalCases(), endpointCases(), hintCases(),
		affinityCases(), clientCases(), hairpinCases(), changeCases(), updateCases(), socketCases(), balanceCases(), conflictCases(),
		takeoverCases(), bypassCases(),
	)
}

// EverywhereCases returns the cases that also run on other networks.
func EverywhereCases() []Case {
	return slices.DeleteFunc(Cases(), func(c Case) bool { return !c.Everywhere })
}
