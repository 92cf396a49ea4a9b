package intent

import (
	"maps"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/facts/model"
)

// annotationPrefix begins the annotations of model.Service.Annotations.
const annotationPrefix = "spillway.dev/"

// annotations are those of Services.
var annotations = []string{
	BalanceAnnotation, ForwardingAnnotation, HelperAnnotation, LocalRedirectAnnotation,
	OutlierEjectionAnnotation, SlowStartAnnotation, SYNFilterAnnotation, WeightsAnnotation,
}

// refuseUnknown complains of other annotations, which are typing errors, or of another release.
func refuseUnknown(svc *model.Service, complain func(field, what string)) {
	for _, name := range slices.Sorted(maps.Keys(svc.Annotations)) {
		if !slices.Contains(annotations, name) {
			known := strings.ReplaceAll(strings.Join(annotations, ", "), annotationPrefix, "")
			complain(annotationField(name), "has no effect: this agent knows "+annotationPrefix+" with "+known)
		}
	}
}
