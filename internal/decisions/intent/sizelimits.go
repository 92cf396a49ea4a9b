package intent

import (
	"fmt"

	"spillway.dev/spillway/internal/facts/model"
)

const (
	// maxEndpoints bounds the endpoints of one Service, each counted once per port, or once
	// for each of its shares.
	// Otherwise two objects of 1 MB, a Service with thousands of ports and a slice with
	// thousands of ports and endpoints, would produce hundreds of millions.
	maxEndpoints = 1 << 19
	// maxUnverified bounds the pods that must traverse netfilter and that only slices
	// name. Any author of slices can name any number of addresses, and a dataplane has
	// room for only so many pods. Starting pods do not need a slice; see PoliciesExist.
	maxUnverified = 1024
	// maxProblems bounds the Problems of one Service.
	maxProblems = 16
)

func tooManyEndpoints(name model.Name, served int) model.Problem {
	return model.ServiceProblem(name, "spec.ports",
		fmt.Sprintf("only the first %d are served: all ports together have more than %d endpoints, shares by weight or entries of maglev's "+
			"tables; make it several Services", served, maxEndpoints))
}

// capProblems keeps the first Problems of a Service and adds that there are more.
func capProblems(name model.Name, all []model.Problem) []model.Problem {
	if len(all) <= maxProblems {
		return all
	}
	return append(all[:maxProblems:maxProblems], model.ServiceProblem(name, "",
		fmt.Sprintf("has more problems than these %d; fix these first", maxProblems)))
}
