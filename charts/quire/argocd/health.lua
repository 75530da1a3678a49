-- Health check of LLMDeployments for Argo CD. Argo CD runs it with the object as `obj` if its ConfigMap argocd-cm has
-- this text under the key resource.customizations.health.quire.dev_LLMDeployment.
local status = obj.status
if status == nil or status.conditions == nil then
  return {status = "Progressing", message = "waiting for the operator"}
end
if status.observedGeneration ~= obj.metadata.generation then
  return {status = "Progressing", message = "waiting for the operator to act on the changed spec"}
end

local conditions = {}
for _, condition in ipairs(status.conditions) do
  conditions[condition.type] = condition
end

local function is_true(name)
  return conditions[name] ~= nil and conditions[name].status == "True"
end

local function health(status, name)
  return {status = status, message = conditions[name].reason .. ": " .. conditions[name].message}
end

if is_true("Stalled") then
  return health("Degraded", "Stalled")
end
if is_true("Ready") then
  return health(obj.spec.paused and "Suspended" or "Healthy", "Ready")
end
if is_true("Reconciling") then
  return health("Progressing", "Reconciling")
end
return {status = "Progressing", message = "waiting for the operator"}
