// Package deploy tests what deploy/ holds as far as that takes no cluster: what
// Helm makes of the chart, which values it refuses, and the versions that it names.
//
// Each testdata/NAME.values.yaml renders to testdata/NAME.yaml; go test -update
// writes them anew. test/controlplane gives those to a real API server and runs
// the agent as they say.
package deploy
