package e2e

import (
	_ "embed"
	"errors"
	"fmt"
	"slices"

	"sigs.k8s.io/yaml"
)

//go:embed expected.yaml
var expectedYAML []byte

// Expected is a test that fails on this kind of cluster, and why.
type Expected struct {
	Test      string   `json:"test"`
	Proxies   []string `json:"proxies"` // labels of the runs where it fails; none is all
	CNIs      []string `json:"cnis"`    // the same
	Reason    string   `json:"reason"`
	Reference string   `json:"reference"` // upstream, for the reason
}

// ExpectedFailures returns the committed list.
func ExpectedFailures() ([]Expected, error) {
	var list []Expected
	if err := yaml.UnmarshalStrict(expectedYAML, &list); err != nil {
		return nil, fmt.Errorf("read expected.yaml: %w", err)
	}
	for _, e := range list {
		if e.Test == "" || e.Reason == "" || e.Reference == "" {
			return nil, fmt.Errorf("read expected.yaml: %q: test, reason and reference must not be empty", e.Test)
		}
	}
	return list, nil
}

// Check compares a run with expected failures. Each other failed test is an error, and
// each expected failure that passed.
func (r *Report) Check(expected []Expected) error {
	var errs []error
	for _, t := range r.Tests {
		i := slices.IndexFunc(expected, func(e Expected) bool {
			return e.Test == t.Name &&
				(len(e.Proxies) == 0 || slices.Contains(e.Proxies, r.Label)) &&
				(len(e.CNIs) == 0 || slices.Contains(e.CNIs, r.CNI))
		})
		switch {
		case t.State == Failed && i < 0:
			errs = append(errs, fmt.Errorf("%s: %s failed: %.300s", r.Label, t.Name, t.Message))
		case t.State == Passed && i >= 0:
			errs = append(errs, fmt.Errorf("%s: %s passed: delete it from expected.yaml (%s)", r.Label, t.Name, expected[i].Reason))
		}
	}
	return errors.Join(errs...)
}
