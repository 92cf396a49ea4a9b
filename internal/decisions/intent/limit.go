package intent

import (
	"fmt"

	"spillway.dev/spillway/internal/facts/model"
)

const (
	// maxEndpoints bounds the endpoints of one Service, each counted once for each
	// port. Two objects of 1 MB, a Service with thousands of ports and a slice with
	// thousands of ports and endpoints, would else make hundreds of millions.
	maxEndpoints = 1 << 19
	// maxUnverified bounds the policed pods that only slices name. Whoever may write
	// slices can name any number of addresses, and a dataplane has room for so many
	// pods. Those of pods that start are policed without a slice; see PoliciesExist.
	maxUnverified = 1024
	// maxProblems bounds the reports about one Service.
	maxProblems = 16
)

func tooManyEndpoints(name model.Name, served int) model.Problem {
	return model.ServiceProblem(name, "spec.ports",
		fmt.Sprintf("only the first %d are served: all ports together have more than %d endpoints; make it several Services", served, maxEndpoints))
}

// capProblems keeps the first problems of a Service and says that there are more.
func capProblems(name model.Name, all []model.Problem) []model.Problem {
	if len(all) <= maxProblems {
		return all
	}
	return append(all[:maxProblems:maxProblems], model.ServiceProblem(name, "",
		fmt.Sprintf("has more problems than these %d; fix these first", maxProblems)))
}
