package nodeclient

import (
	"slices"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/diagnosis/doctor"
)

// Findings returns findings of an agent as doctor has them, in their order. An earlier agent gives
// no object.
func Findings(list []*nodev1alpha1.Finding) (out []doctor.Finding) {
	for _, f := range list {
		one := doctor.Finding{
			ID: f.Id, Severity: doctor.Severity(f.Severity), Title: f.Title, Evidence: f.Evidence, Packets: f.Detail, Remedy: f.Fix,
			Commands: f.Commands, Documentation: f.Documentation,
		}
		if o := f.Object; o != nil {
			one.Object = doctor.Object{Kind: o.Kind, Namespace: o.Namespace, Name: o.Name, Port: o.Port, Endpoint: o.Endpoint}
		}
		if f.Since != nil {
			one.Since = f.Since.AsTime()
		}
		out = append(out, one)
	}
	return out
}

// Faults returns those of the findings that are a fault: info may be intended.
func Faults(list []*nodev1alpha1.Finding) []doctor.Finding {
	return slices.DeleteFunc(Findings(list), func(f doctor.Finding) bool { return !f.Severity.AtLeast(doctor.Warning) })
}
